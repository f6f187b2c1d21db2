"""Which part of a hybrid does the work, its window or its linear attention? Perplexity with each alone.

python -m hf_linattn.eval.branches --model DIR --data book.txt --lengths 512,...,4096 --output-dir out
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import nn

from hf_linattn.cli.main import exit_status
from hf_linattn.patching.contexts import Branches, use_branches

from .common.cli import checked, doubling, parse_options, whole
from .common.statistics import Row
from .common.windows import Bos, Stride, encode, plan_windows
from .perplexity.__main__ import LENGTHS
from .perplexity.measure import score_length

__all__ = ["compare_branches", "main"]

FOUR: tuple[Branches, ...] = ("both", "window", "rest", "none")
EPILOG = """\
examples (`branches` stands for `python -m hf_linattn.eval.branches`):
  # a converted folder: what do its window and its linear attention carry?
  branches --model tuned --data books/ --lengths 512,...,4096 --output-dir out

  # a hybrid before any training
  branches --model DIR --patch window+elu1 --options '{"size": 64}' --data book.txt --output-dir out

  # also the linear attention over all tokens, as it is when it is trained without the window
  branches --model tuned --data books/ --branches both,window,rest,linear,none --output-dir out

From Python, for a model in memory: from hf_linattn.eval.branches import compare_branches

both    the hybrid as it is
window  softmax over the window alone
rest    the linear attention alone, as the hybrid uses it: over the tokens outside the window
none    neither
linear  the linear attention alone, over all tokens: as it is trained where it is trained without the window

The folder gets results.json, results.csv and branches.png. results.json is renewed after every length: the
same command goes on where it stopped. docs/generation.md says how to read it.
"""


def compare_branches(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str],
    lengths: Sequence[int],
    *,
    branches: Sequence[Branches] = FOUR,
    stride: Stride = 256,
    max_tokens: int | None = 65536,
    batch_size: int = 1,
    bos: Bos = "auto",
    join: bool = False,
    progress: bool = False,
) -> dict[str, list[Row]]:
    """Perplexity at every length with each of the branches, as `scoring.measure` has it.

    Args:
        model: a causal language model with hybrids ("window+elu1"); left as it is found.
        tokenizer: its tokenizer.
        documents: one string per document.
        lengths: tokens per window of text.
        branches: what to measure, see `hf_linattn.patching.contexts`.
        stride: scored tokens per window of text, or "full".
        max_tokens: scored tokens per length; None takes all.
        batch_size: windows of text per forward pass.
        bos: "auto", "yes", "no" or "window".
        join: one document of all.
        progress: show bars on stderr.

    Raises:
        UnsupportedModelError: no attention of the model is a hybrid, or it is an encoder.
        OptionError: unknown branches, or a number out of its range.
        DataError: no document is long enough, or the loss is not finite.
    """
    plan = plan_windows(
        encode(tokenizer, documents, bos=bos, join=join), lengths, stride=stride, max_tokens=max_tokens
    )
    found: dict[str, list[Row]] = {}
    for name in branches:
        with use_branches(model, name):
            settings: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
            found[name] = [score_length(model, plan, length, **settings) for length in plan.lengths]
    return found


def _branches(text: str) -> list[str]:
    known, names = get_args(Branches), [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no branches {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.branches",
        description="Perplexity of a hybrid (window and linear attention) with each of its branches alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of a causal language model patched with a hybrid")
    add("--tokenizer", help="folder or name of the tokenizer (default: the model's)")
    add("--data", required=True, help="text file, folder, .jsonl/.json/.parquet/.csv, or a dataset's name")
    add("--column", default="text", help="text column of a table (default: %(default)s)")
    add("--split", default="train", help="split of a dataset given by name (default: %(default)s)")
    lengths_help = f"tokens per window of text; '...' doubles (default: {LENGTHS})"
    add("--lengths", type=doubling, default=doubling(LENGTHS), help=lengths_help)
    stride_help = "score the last STRIDE tokens of each window of text (default: %(default)s)"
    add("--stride", type=whole, default=256, help=stride_help)
    budget_help = "scored tokens per length (default: %(default)s)"
    add("--max-tokens", type=whole, default=65536, help=budget_help)
    add("--batch-size", type=whole, default=1, help="windows of text per forward pass (default: 1)")
    bos_help = "BOS before each document: as the tokenizer does, yes, no; or at the start of every window"
    add("--bos", choices=("auto", "yes", "no", "window"), default="auto", help=bos_help)
    add("--join", action="store_true", help="join the documents, in order, into one")
    add("--patch", help="hybrid to try on the loaded model, such as window+elu1")
    add("--options", type=checked(parse_options), help="options of --patch as JSON")
    branches_help = f"what to measure (default: {','.join(FOUR)})"
    add("--branches", type=_branches, default=list(FOUR), help=branches_help)
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="(default: as saved)")
    add("--seed", type=int, default=0, help="for patches with random parameters (default: %(default)s)")
    output_help = "folder for the results; the same command resumes there"
    add("--output-dir", type=Path, required=True, help=output_help)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.options is not None and args.patch is None:
        parser.error("--options belongs to --patch")

    def work() -> None:
        from .perplexity.branches_run import run
        from .perplexity.tables import curve_table

        results = run(args, shlex.join(["python", "-m", "hf_linattn.eval.branches", *argv]))
        print("\n".join([curve_table(results["rows"]), *results["sentences"]]))
        tokens = results["rows"][0]["tokens"]
        print(f"the same {tokens} tokens at every length; numbers and plot in {args.output_dir}")

    return exit_status(work, interrupted="the same command goes on after the last finished length")


if __name__ == "__main__":
    sys.exit(main())
