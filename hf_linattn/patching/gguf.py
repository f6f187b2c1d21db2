"""Models loaded from GGUF files: what transformers marks them with, and what loading them can fail on."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from torch import nn

from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.patching.loading import MISSING, first_line

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
    where = str(Path(source, file))
    try:
        return loader.from_pretrained(source, **kwargs)
    except ImportError as error:
        raise CheckpointError(
            f'{where}: reading GGUF needs the packages gguf and accelerate (pip install "hf-linattn[gguf]"): '
            f"{first_line(error)}"
        ) from error
    except (*MISSING, struct.error, IndexError) as error:
        raise CheckpointError(
            f"{where}: not a whole GGUF file that transformers can read: {first_line(error)}"
        ) from error
