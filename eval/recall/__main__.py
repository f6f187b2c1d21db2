"""Recall: can a model, patched or not, find again what it read?

python -m hf_linattn.eval.recall --model DIR --compare elu1,window --tasks induction,passkey --output-dir out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common import cli
from ..common.model_specs import add_compare_argument
from .tasks import TASKS

LENGTHS, DEPTHS = "128,256,512,1024", "0,0.25,0.5,0.75,1"
EPILOG = """\
examples (`recall` stands for `python -m hf_linattn.eval.recall`):
  # all four tasks: can this model do them at all, and up to which length?
  recall --model DIR --lengths 128,...,4096 --output-dir out

  # what is left of that after a patch, before any training: entries as in `perplexity --compare`
  recall --model DIR --compare elu1,window:size=64,logn@yarn:8 --output-dir out

  # fine-tuned folders beside their original, which comes first
  recall --model original tuned-elu1 tuned-hedgehog --tasks induction,mqar --output-dir out

  # your own questions, one JSON object a line: {"prompt": "... The key is", "answer": " 42"};
  # "name" and "depth" sort them, "candidates" are what could be answered instead
  recall --model DIR --cases questions.jsonl --lengths 512,4096 --output-dir out

tasks:
  passkey    a number of five digits in filler text
  key_value  a list of `red river: stone,` over the whole context, then one of the keys
  induction  random tokens; a part of them comes again, and is predicted from its second token on
  mqar       16 pairs of random tokens, then all their keys again (arXiv:2312.04927)

From Python, for a model in memory: from hf_linattn.eval.recall import measure_recall

Samples have exactly the given number of tokens, BOS and answer included. The unpatched model is always
measured first: where it cannot do a task, recall of its patched versions means nothing, and the output says
so. The folder gets results.json, results.csv, a heatmap (length x depth) per task and curves.png. The json is
renewed after every row: the same command goes on where it stopped. docs/recall.md says what exactly is asked.
"""


def _depths(text: str) -> list[float]:
    depths = [cli.parse_float(part) for part in text.split(",")]
    if not all(0 <= depth <= 1 for depth in depths):
        raise argparse.ArgumentTypeError(
            f"expected numbers from 0 (start) to 1 (end), as in {DEPTHS}, got {text!r}"
        )
    return depths


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = cli.command_parser(
        "recall", "What a model finds again of what it read, by length and depth.", EPILOG
    )
    add = parser.add_argument
    model_help = "folders or names of causal language models; the first is also measured without its patch"
    add("--model", required=True, nargs="+", help=model_help)
    seed = "of samples and of patches with random parameters"
    cli.add_model_arguments(parser, None, tokenizer="the first model's", seed=seed)
    add_compare_argument(parser, "patches to try on the first model", "--patch", dest="patch")
    tasks_help = f"by comma (default: {','.join(TASKS)}; with --cases only those)"
    add("--tasks", type=cli.names_of(list(TASKS), "task"), help=tasks_help)
    add("--cases", type=Path, metavar="FILE.jsonl", help="questions of your own")
    add(
        "--lengths",
        type=cli.doubling_range,
        default=LENGTHS,
        help="tokens; '...' doubles (default: %(default)s)",
    )
    add("--depths", type=_depths, default=DEPTHS, help="0: start, 1: end (default: %(default)s)")
    samples_help = "samples per task, length and depth (default: %(default)s)"
    add("--samples", type=cli.positive_int, default=20, help=samples_help)
    add("--batch-size", type=cli.positive_int, help="samples per forward pass (default: 8192 tokens' worth)")
    bos_help = "BOS before each sample: as the tokenizer does, yes or no (default: %(default)s)"
    add("--bos", choices=("auto", "yes", "no"), default="auto", help=bos_help)
    train_help = "length to mark in the plot (default: from the configuration)"
    add("--train-length", type=cli.positive_int, help=train_help)
    cli.add_output_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

    def work(args: argparse.Namespace, command: str) -> str:
        from .plot import summary
        from .run import run

        return summary(run(args, command), args.output_dir)

    interrupted = "the same command goes on after the last finished row"
    return cli.run_command(build_parser(), work, argv, check=_with_tasks, interrupted=interrupted)


def _with_tasks(args: argparse.Namespace) -> argparse.Namespace:
    if args.tasks is None:
        args.tasks = [] if args.cases else list(TASKS)
    return args


if __name__ == "__main__":
    sys.exit(main())
