"""Models loaded from GGUF files: what transformers marks them with, and what loading them can fail on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn

from hf_linattn.errors import OptionError
from hf_linattn.patching.loading import explain_gguf, gguf_parts

MODEL_MARKS = ("hf_quantizer", "quantization_method", "is_quantized")
CONFIG_MARKS = ("quantization_config", "_is_quantized")


def is_marked(model: nn.Module) -> bool:
    """Tell whether a model carries the quantiser of GGUF files, which saves nothing."""
    quantiser = model.__dict__.get("hf_quantizer")
    method = getattr(getattr(quantiser, "quantization_config", None), "quant_method", None)
    return getattr(method, "value", method) == "gguf"


def packed_weight(model: nn.Module) -> str | None:
    """Name a weight that is still in GGUF blocks; None where all were unpacked to floating numbers."""
    return next((name for name, x in model.named_parameters() if not x.is_floating_point()), None)


def load(loader: Any, source: str, **kwargs: Any) -> Any:
    """Load a GGUF file: an unpatched model.

    Args:
        loader: a class with `from_pretrained`.
        source: the folder or hub name that holds the file.
        **kwargs: transformers' own, `gguf_file` among them.

    Raises:
        CheckpointError: no such file, a damaged or cut one, or a package that reads it is missing.
        OptionError: `gguf_file` names nothing.
    """
    file = kwargs["gguf_file"]
    if not isinstance(file, str) or not file:
        raise OptionError(f"gguf_file must be the name of a file, got {file!r}")
    with explain_gguf(str(Path(source, file))):
        return loader.from_pretrained(source, **kwargs)


def load_unpacked(loader: Any, file: str, **kwargs: Any) -> Any:
    """Load FILE.gguf with all weights unpacked, as an ordinary model: it trains and saves as any other.

    Args:
        loader: a class with `from_pretrained`.
        file: in a folder or behind a Hub name.
        **kwargs: transformers' own.

    Raises:
        CheckpointError: see `load`.
    """
    place, keyword = gguf_parts(file)
    if config := getattr(transformers, "GgufConfig", None):  # before it, weights were always unpacked
        kwargs.setdefault("quantization_config", config(dequantize=True))
    loaded = load(loader, place, **kwargs, **keyword)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if packed_weight(model) is None:
        configs = (module.config for module in model.modules() if hasattr(module, "config"))
        for owner, marks in ((model, MODEL_MARKS), *((config, CONFIG_MARKS) for config in configs)):
            for mark in marks:
                owner.__dict__.pop(mark, None)
    return loaded
