"""Does a patched model still write the same? Greedy continuations beside those of the unpatched model.

python -m hf_linattn.eval.generation --model DIR --compare softmax1,elu1 --data book.txt --output-dir out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linattn.errors import OptionError

from ..common import cli
from ..common.model_specs import add_compare_argument

TO_COMPARE: dict[str, Any] = {"prompt_tokens": 64, "count": 16, "new_tokens": 64, "batch_size": 8}
TO_SAMPLE: dict[str, Any] = {"samples": 1, "new_tokens": 120}
"""Defaults of the two ways to use the command."""
ONLY_COMPARE = ("original", "compare", "prompts", "data", "join", "prompt_tokens", "count", "batch_size")
ONLY_SAMPLE = ("prompt", "prompt_file", "samples", "greedy", "temperature", "output")
EPILOG = """\
examples (`generation` stands for `python -m hf_linattn.eval.generation`):
  # patches of one model, before any training: an entry is PATCH[:OPTION=VALUE...][@KIND:FACTOR]
  generation --model DIR --compare softmax1,window+elu1:size=64 --data book.txt --output-dir out

  # fine-tuned folders beside the model that they came from
  generation --original DIR --model tuned/elu1 tuned/softmax1 --data book.txt --output-dir out

  # a folder that was patched and saved, but not trained: its original is inside
  generation --model patched --data book.txt --output-dir out

  # prompts of your own, one per line
  generation --original DIR --model tuned --prompts prompts.txt --new-tokens 200 --output-dir out

  # what models write, one beside the other: a long prompt from a file, three random continuations
  generation --model tuned original --prompt "Once upon a time" --output samples.json
  generation --model tuned original --prompt-file chapter.txt --temperature 0.8 --samples 3 --output s.json

From Python, for models in memory: from hf_linattn.eval.generation import compare_generation, generate

The folder gets results.json (everything, KL at every token too), generation.csv (a row per model and prompt),
generation.md (continuations side by side) and kl.png. results.json is renewed after every model: the same
command goes on where it stopped. docs/generation.md says what each number means.
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = cli.command_parser(
        "generation",
        "Greedy continuations of patched models beside the unpatched one's, and KL between them.",
        EPILOG,
    )
    add = parser.add_argument
    model_help = "folders or names of patched models; with --compare and no --original: the unpatched one"
    add("--model", nargs="+", action="extend", help=model_help)
    original_help = "folder or name of the unpatched model (default: the patched one, its patch switched off)"
    add("--original", help=original_help)
    add_compare_argument(parser, "patches of the unpatched model")
    cli.add_model_arguments(parser, None, tokenizer="the original's")
    add("--prompts", type=Path, help="text file with one prompt per line")
    cli.add_text_arguments(parser, required=False, data="text to cut into prompts", window_bos=False)
    add("--prompt-tokens", type=cli.positive_int, help="tokens per prompt of --data (default: 64)")
    add("--count", type=cli.positive_int, help="prompts of --data, in turn from every document (default: 16)")
    tokens_help = "tokens to write per prompt (default: 64, or 120 after --prompt)"
    add("--new-tokens", "--max-new-tokens", type=cli.positive_int, help=tokens_help)
    add("--batch-size", type=cli.positive_int, help="prompts per forward pass (default: 8)")
    cli.add_output_arguments(parser, required=False)
    group = parser.add_argument_group("without comparing")
    group.add_argument("--prompt", action="append", default=[], help="text to continue; repeatable")
    file_help = "file with a prompt; repeatable"
    group.add_argument("--prompt-file", action="append", default=[], type=Path, help=file_help)
    how = group.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="always the likeliest token (the default)")
    how.add_argument("--temperature", type=_temperature, help="draw tokens at this temperature")
    group.add_argument("--samples", type=cli.positive_int, help="continuations per prompt (default: 1)")
    group.add_argument("--output", type=Path, help="JSON file for the continuations")
    return parser


def _temperature(text: str) -> float:
    value = cli.parse_float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}; for 0 use --greedy")
    return value


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse combinations in which an argument would do nothing, and fill in defaults."""
    if args.model is None and args.original is None:
        raise OptionError("name a model with --model")
    samples = bool(args.prompt or args.prompt_file)
    side, names = ("with", ONLY_COMPARE) if samples else ("without", ONLY_SAMPLE)
    cli.refuse_options(args, names, f"{side} --prompt or --prompt-file")
    if samples and args.output is None:
        raise OptionError("name the file for the continuations with --output")
    if not samples and (args.prompts is None) == (args.data is None):
        raise OptionError(
            "give the prompts by --prompts, or by --data as text to cut them from, or as text by --prompt"
        )
    if not samples and args.output_dir is None:
        raise OptionError("name a folder with --output-dir")
    if args.prompts is not None:
        cli.refuse_options(args, ("prompt_tokens", "count", "join"), "with --prompts")
        args.prompts = str(args.prompts)
    for name, value in (TO_SAMPLE if samples else TO_COMPARE).items():
        if getattr(args, name) is None and not (args.prompts and name in ("prompt_tokens", "count")):
            setattr(args, name, value)
    if args.prompt_tokens is not None and args.prompt_tokens < 2:
        raise OptionError("--prompt-tokens must be at least 2")
    for name in () if samples else ONLY_SAMPLE:
        delattr(args, name)  # results.json tells what was asked
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

    def work(args: argparse.Namespace, command: str) -> str:
        from . import run, samples

        return samples.run(args, command) if "prompt" in args else run.run(args, command)

    interrupted = "the same command goes on after the last finished model, with --prompt from the start"
    return cli.run_command(build_parser(), work, argv, check=_checked, interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main())
