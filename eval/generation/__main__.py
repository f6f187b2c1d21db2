"""Does a patched model still write the same? Greedy continuations beside those of the unpatched model.

python -m hf_linattn.eval.generation --model DIR --compare softmax1,elu1 --data book.txt --output-dir out
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from hf_linattn.cli.main import exit_status

from ..common.cli import checked, whole
from ..common.model_specs import parse_specs
from .comparison import Comparison
from .measure import compare_generation

__all__ = ["compare_generation", "main"]

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

From Python, for models in memory: from hf_linattn.eval.generation import compare_generation

The folder gets results.json (everything, KL at every token too), generation.csv (a row per model and prompt),
generation.md (continuations side by side) and kl.png. results.json is renewed after every model: the same
command goes on where it stopped. docs/generation.md says what each number means.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.generation",
        description="Greedy continuations of patched models beside the unpatched one's, and KL between them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    model_help = "folders or names of patched models; with --compare and no --original: the unpatched one"
    add("--model", nargs="+", action="extend", help=model_help)
    original_help = "folder or name of the unpatched model (default: the patched one, its patch switched off)"
    add("--original", help=original_help)
    compare_help = "patches of the unpatched model, by comma, as in hf_linattn.eval.perplexity; repeatable"
    add("--compare", type=checked(parse_specs), action="extend", metavar="ENTRIES", help=compare_help)
    add("--tokenizer", help="folder or name of the tokenizer (default: the original's)")
    add("--prompts", type=Path, help="text file with one prompt per line")
    add("--data", help="text to cut into prompts: file, folder, .jsonl/.json/.parquet/.csv, dataset's name")
    add("--column", default="text", help="text column of a table (default: %(default)s)")
    add("--split", default="train", help="split of a dataset given by name (default: %(default)s)")
    add("--join", action="store_true", help="join the documents, in order, into one")
    add("--prompt-tokens", type=whole, help="tokens per prompt of --data (default: 64)")
    add("--count", type=whole, help="prompts of --data, in turn from every document (default: 16)")
    add("--new-tokens", type=whole, default=64, help="tokens to write per prompt (default: %(default)s)")
    add("--batch-size", type=whole, default=8, help="prompts per forward pass (default: %(default)s)")
    bos_help = "BOS before each document or line: as the tokenizer does, yes, no"
    add("--bos", choices=("auto", "yes", "no"), default="auto", help=bos_help)
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="(default: as saved)")
    add("--seed", type=int, default=0, help="for patches with random parameters (default: %(default)s)")
    output_help = "folder for the results; the same command resumes there"
    add("--output-dir", type=Path, required=True, help=output_help)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse, and refuse combinations in which an argument would do nothing."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.model is None and args.original is None:
        parser.error("name a model with --model")
    if (args.prompts is None) == (args.data is None):
        parser.error("give the prompts by --prompts, or by --data as text to cut them from; one of the two")
    if args.prompts is not None:
        for name in ("prompt_tokens", "count", "join"):
            if getattr(args, name):
                parser.error(f"--{name.replace('_', '-')} has no meaning with --prompts")
        args.prompts = str(args.prompts)
    else:
        args.prompt_tokens, args.count = args.prompt_tokens or 64, args.count or 16
        if args.prompt_tokens < 2:
            parser.error("--prompt-tokens must be at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)

    def work() -> None:
        from .outputs import table
        from .run import run

        results, found = run(args, shlex.join(["python", "-m", "hf_linattn.eval.generation", *argv]))
        print("\n".join([table(found.summaries()), *_sentences(args, results, found)]))

    return exit_status(work, interrupted="the same command goes on after the last finished model")


def _sentences(args: argparse.Namespace, results: dict[str, Any], found: Comparison) -> list[str]:
    """What one needs to read the table."""
    return [
        f"original: {results['original']['note']}",
        f"agreement: tokens before the first difference, of {args.new_tokens}; repetition: share of 4-grams "
        "seen before in the continuation",
        "KL(original || model) and top-1 are taken along the original's continuation; stderr over prompts",
        f"{len(found.prompts)} prompts; results.json, generation.csv, generation.md and kl.png in "
        f"{args.output_dir}",
    ]


if __name__ == "__main__":
    sys.exit(main())
