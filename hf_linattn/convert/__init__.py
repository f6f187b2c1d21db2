"""Convert a pretrained model to another attention: `python -m hf_linattn.convert`, `convert`."""

from __future__ import annotations

from typing import Any

from hf_linattn.convert.arguments import ConvertArguments

__all__ = ["ConvertArguments", "convert"]


def convert(
    model: Any, data: Any, *, patch: Any = None, output_dir: str, tokenizer: Any = None, **arguments: Any
) -> Any:
    """Convert a model and return it, in evaluation mode.

    Args:
        model: folder or Hub name, or a model, which is saved below `output_dir` first and stays as it is.
        data: text as the command's `--data` takes it, a list of texts, or a `datasets.Dataset` with a column
            of text.
        patch: a name, or a plan per layer that JSON can hold; None for that of the preset, `hybrid` unless
            `preset` names another.
        output_dir: where everything is written.
        tokenizer: folder or Hub name, or a tokenizer; by default the model's.
        **arguments: more fields of `ConvertArguments`.

    Raises:
        DataError: the text or the tokenizer cannot be used.
        TrainingError: a stage cannot start or go on; the message names it and what is kept.
        OptionError: an option that does not fit, or cannot be used on this machine.

    >>> import tempfile
    >>> from hf_linattn import describe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = convert(
    ...         "examples/base", "README.md", output_dir=folder, tokens=512, block_size=64, cpu=True,
    ...     )
    >>> sorted({row.patch for row in describe(model)})
    ['window+gated']
    """
    # Imported here so that --help and a wrong option answer without loading accelerate and datasets.
    from hf_linattn import from_pretrained
    from hf_linattn.convert.outputs import SOURCE, conversion_folder, save_source
    from hf_linattn.convert.run import run
    from hf_linattn.registry import parse

    text = data if isinstance(data, str) else "(in memory)"
    ConvertArguments("", text, output_dir, patch, **arguments)  # what is wrong here is said before anything
    if isinstance(patch, str):
        parse(patch, arguments.get("options"))
    with conversion_folder(output_dir).leaving_nothing(SOURCE):
        overwrite = bool(arguments.get("overwrite"))
        source, tokenizer_source = save_source(model, tokenizer, output_dir, overwrite)
        options = ConvertArguments(source, text, output_dir, patch, tokenizer=tokenizer_source, **arguments)
        result = run(options, f"convert({options!r})", None if isinstance(data, str) else data)
    return from_pretrained(result.folder).eval()
