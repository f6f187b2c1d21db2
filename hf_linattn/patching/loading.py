"""Load configs and tokenizers by folder, Hub name or GGUF file; what is not there becomes one line."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.utils.hub import cached_file

from hf_linattn.errors import CheckpointError, DataError, LinattnError
from hf_linattn.ops.switches import switch
from hf_linattn.patching.discovery import is_text_alone

TRUST = "HF_LINATTN_TRUST_REMOTE_CODE"
"""Environment variable: 1 loads models as `trust_remote_code=True` does."""
MISSING = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""What transformers 5 raises for a folder without the files that it looks for, or with damaged ones."""


def first_line(error: Exception) -> str:
    """Cut a library's message of many lines to the first; an empty one becomes the error's name."""
    text = str(error).strip() or type(error).__name__
    hint = f" Read it; {TRUST}=1 runs it" if "trust_remote_code=True" in text else ""
    lines = text.splitlines()
    return (" ".join(lines) if lines[0].rstrip().endswith(":") else lines[0]) + hint


def trust() -> dict[str, bool]:
    """Give transformers' keyword for code beside a model, as the environment says.

    Raises:
        OptionError: the variable is neither 0 nor 1.
    """
    asked = switch(TRUST, "1 runs the code that lies beside a model, 0 does not, as if it were not set")
    return {"trust_remote_code": True} if asked == "1" else {}


@contextmanager
def explain_missing(message: str, kind: type[LinattnError]) -> Iterator[None]:
    """Turn what transformers raises for files that are not there into one error of this package.

    Args:
        message: what could not be loaded; the first line of the reason is added.
        kind: the error to raise.

    Raises:
        LinattnError: of that kind; those of this package pass as they are.
    """
    try:
        yield
    except LinattnError:
        raise
    except MISSING as error:
        raise kind(f"{message}: {first_line(error)}") from error


def model_inside(source: str) -> str:
    """Say where the model is that a folder does not hold, or that it is none; "" where nothing tells."""
    folder = Path(source).expanduser()
    if folder.is_file():
        return " (is a file: a model is a folder, a Hub name or FILE.gguf)"
    if (folder / "config.json").exists():
        return ""
    if (folder / "adapter_config.json").exists():
        return (
            " (holds a peft adapter: load its base model, then PeftModel.from_pretrained; commands take the "
            "folder that merge_and_unload().save_pretrained(...) of that writes)"
        )
    configs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return f" (the model is in {configs[-1].parent})" if configs else ""


def gguf_parts(source: str) -> tuple[str, dict[str, str]]:
    """Take a source apart for transformers: folder or Hub name, and the keyword that FILE.gguf in it needs.

    >>> gguf_parts("models/small-q8.gguf"), gguf_parts("Qwen/Qwen3-0.6B")
    (('models', {'gguf_file': 'small-q8.gguf'}), ('Qwen/Qwen3-0.6B', {}))
    """
    path = Path(source).expanduser()
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return source, {}
    return str(path.parent), {"gguf_file": path.name}


@contextmanager
def explain_gguf(where: str) -> Iterator[None]:
    """Turn what transformers raises for a GGUF file into one error.

    Raises:
        CheckpointError: no such file, a damaged or cut one, or a package that reads it is missing.
    """
    path = Path(where).expanduser()
    if path.parent.is_dir() and not path.is_file():
        raise CheckpointError(f"no such GGUF file: {where}")
    try:
        yield
    except ImportError as error:
        raise CheckpointError(
            f'{where}: reading GGUF needs the packages gguf and accelerate (pip install "hf-linattn[gguf]"): '
            f"{first_line(error)}"
        ) from error
    except (*MISSING, struct.error, IndexError) as error:
        raise CheckpointError(
            f"{where}: not a whole GGUF file that transformers can read: {first_line(error)}"
        ) from error


def _read(loader: Any, source: str, message: str, kind: type[LinattnError]) -> Any:
    """Load a config or tokenizer from a folder, a Hub name or a GGUF file."""
    place, keyword = gguf_parts(source)
    with explain_gguf(source) if keyword else explain_missing(message + model_inside(source), kind):
        return loader.from_pretrained(place, **keyword, **trust())


def load_config(source: str) -> Any:
    """Load a model's configuration.

    Raises:
        CheckpointError: there is none.
    """
    if source.startswith(("/", ".", "~")) and not Path(source).exists():
        raise CheckpointError(f"no such folder: {source}")
    return _read(AutoConfig, source, f"no model at {source!r}", CheckpointError)


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a folder, a Hub name or a GGUF file, any kind that transformers knows.

    Raises:
        DataError: there is none.
    """
    message, place = f"no tokenizer in {source}", Path(gguf_parts(source)[0]).expanduser()
    if place.is_dir():
        message += " (give one with --tokenizer)"
    if not place.exists():
        message = (
            f"no folder {source}, and no tokenizer of this name on the Hub (or give one with --tokenizer)"
        )
    return _read(AutoTokenizer, source, message, DataError)


def processor_files(source: str, config: Any) -> list[Path]:
    """List the files of a model by which its processor reads images and sounds, beside the tokenizer.

    Args:
        source: folder or Hub name.
        config: of the model; one of text alone has none.
    """
    if is_text_alone(config) or gguf_parts(source)[1]:
        return []
    names = (IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, PROCESSOR_NAME, "chat_template.json")
    missing = "_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"
    found = [cached_file(source, name, **dict.fromkeys(missing, False)) for name in names]
    return [Path(path) for path in found if path is not None]
