"""Recall: can a model, patched or not, find again what it read?

python -m hf_linattn.eval.recall --model DIR --patch elu1,window --tasks induction,passkey --output-dir out
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from hf_linattn.cli.main import exit_status

from ..common.cli import checked, doubling, whole
from ..common.model_specs import parse_specs
from .measure import Row, measure_recall
from .tasks import TASKS

__all__ = ["Row", "main", "measure_recall"]

LENGTHS, DEPTHS = "128,256,512,1024", "0,0.25,0.5,0.75,1"
EPILOG = """\
examples (`recall` stands for `python -m hf_linattn.eval.recall`):
  # all four tasks: can this model do them at all, and up to which length?
  recall --model DIR --lengths 128,...,4096 --output-dir out

  # what is left of that after a patch, before any training: entries as in `perplexity --compare`
  recall --model DIR --patch elu1,window:size=64,logn@yarn:8 --output-dir out

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

Samples have exactly the given number of tokens, BOS and answer included. The model as it came is always
measured first: where it cannot do a task, recall of its patched versions means nothing, and the output says
so. The folder gets results.json, results.csv, a heatmap (length x depth) per task and curves.png. The json is
renewed after every row: the same command goes on where it stopped. docs/recall.md says what exactly is asked.
"""


def _tasks(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return list(dict.fromkeys(names))


def _depths(text: str) -> list[float]:
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths):
        raise argparse.ArgumentTypeError(
            f"expected numbers from 0 (start) to 1 (end), as in {DEPTHS}, got {text!r}"
        )
    return depths


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.recall",
        description="What a model finds again of what it read, by length and depth.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    model_help = "folders or names of causal language models; the first is also measured without its patch"
    add("--model", required=True, nargs="+", help=model_help)
    patch_help = (
        "patches to try on the first model, by comma: PATCH[:OPTION=VALUE...][@KIND:FACTOR] as in "
        "`perplexity --compare`; repeatable"
    )
    add("--patch", type=checked(parse_specs), action="extend", metavar="ENTRIES", help=patch_help)
    add("--tokenizer", help="folder or name of the tokenizer (default: the first model's)")
    add("--tasks", type=_tasks, help=f"by comma (default: {','.join(TASKS)}; with --cases only those)")
    add("--cases", type=Path, metavar="FILE.jsonl", help="questions of your own")
    add("--lengths", type=doubling, default=LENGTHS, help="tokens; '...' doubles (default: %(default)s)")
    add("--depths", type=_depths, default=DEPTHS, help="0: start, 1: end (default: %(default)s)")
    samples_help = "samples per task, length and depth (default: %(default)s)"
    add("--samples", type=whole, default=20, help=samples_help)
    add("--batch-size", type=whole, help="samples per forward pass (default: 8192 tokens' worth)")
    bos_help = "BOS before each sample: as the tokenizer does, yes or no (default: %(default)s)"
    add("--bos", choices=("auto", "yes", "no"), default="auto", help=bos_help)
    add("--train-length", type=whole, help="length to mark in the plot (default: from the configuration)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="(default: as saved)")
    add("--seed", type=int, default=0, help="of samples and of patches with random parameters (default: 0)")
    output_help = "folder for the results; the same command resumes there"
    add("--output-dir", type=Path, required=True, help=output_help)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    if args.tasks is None:
        args.tasks = [] if args.cases else list(TASKS)

    def work() -> None:
        from .run import run

        results = run(args, shlex.join(["python", "-m", "hf_linattn.eval.recall", *argv]))
        print(summary(results, args.output_dir))

    return exit_status(work, interrupted="the same command goes on after the last finished row")


def summary(results: dict[str, Any], folder: Path) -> str:
    """The verdicts, the tables and what one needs to read them."""
    from .tables import tables

    return "\n".join(
        [
            *(verdict["text"] for verdict in results["verdicts"]),
            "",
            tables(results["rows"]),
            "",
            "accuracy: answers right as a whole under greedy decoding; mean over depths +- standard error",
            f"results.json, results.csv and pictures in {folder}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
