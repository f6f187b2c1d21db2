"""Fine-tune a model, its attention patched or not, on text: `python -m hf_linattn.finetune`, `finetune`."""

from __future__ import annotations

from typing import Any

from hf_linattn.finetune.arguments import FinetuneArguments

__all__ = ["FinetuneArguments", "finetune"]


def finetune(arguments: FinetuneArguments, command: str | None = None) -> dict[str, Any]:
    """Train a model on text and return what `results.json` holds.

    Args:
        arguments: the options.
        command: how the run was started, for the record; by default the call from Python.

    Raises:
        DataError: the text or the tokenizer cannot be used.
        TrainingError: training cannot start or go on; the message names the step and what is kept.
        OptionError: an option cannot be used on this machine.
    """
    # Imported here so that --help and a wrong option answer without loading accelerate and datasets.
    from hf_linattn.finetune.run import run

    return run(arguments, command or f"finetune({arguments!r})")
