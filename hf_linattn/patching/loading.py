"""Load configs and tokenizers by folder or Hub name; what is not there becomes one line for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from hf_linattn.errors import CheckpointError, DataError, LinattnError

MISSING = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What transformers 5 raises for a folder without the files that it looks for."""


def first_line(error: Exception) -> str:
    """Cut a library's message of many lines to the first; an empty one becomes the error's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def load_config(source: str) -> Any:
    """Load a model's configuration.

    Raises:
        CheckpointError: there is none.
    """
    if source.startswith(("/", ".", "~")) and not Path(source).is_dir():
        raise CheckpointError(f"no such folder: {source}")
    with explain_missing(f"no model at {source!r}", CheckpointError):
        return AutoConfig.from_pretrained(source)


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a folder or Hub name, any kind that transformers knows.

    Raises:
        DataError: there is none.
    """
    with explain_missing(f"no tokenizer in {source} (give one with --tokenizer)", DataError):
        return AutoTokenizer.from_pretrained(source)
