"""Fine-tune a model, its attention patched or not, on text: `python -m hf_linattn.finetune`, `finetune`."""

from __future__ import annotations

from typing import Any

from hf_linattn.finetune.arguments import FinetuneArguments

__all__ = ["FinetuneArguments", "finetune"]


def finetune(arguments: FinetuneArguments, command: str | None = None) -> dict[str, Any]:
    """Train a model, its attention patched or not, on text; saves it in `arguments.output_dir`.

    Args:
        arguments: the options.
        command: how the run was started, for the record; by default the call from Python.

    Returns:
        What `results.json` holds: "steps", "tokens", "loss", "eval_loss", "seconds" and more.

    Raises:
        DataError: the text or the tokenizer cannot be used.
        TrainingError: training cannot start or go on; the message names the step and what is kept.
        OptionError: an option cannot be used on this machine.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = FinetuneArguments(
    ...         model="examples/base", data="README.md", patch="elu1", output_dir=folder,
    ...         block_size=64, batch_size=2, max_steps=3, cpu=True,
    ...     )
    ...     results = finetune(arguments)
    >>> results["steps"], results["tokens"]
    (3, 384)
    """
    # Imported here so that --help and a wrong option answer without loading accelerate and datasets.
    from hf_linattn.finetune.run import run

    return run(arguments, command or f"finetune({arguments!r})")
