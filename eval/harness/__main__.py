"""Tasks of EleutherAI's lm-evaluation-harness on patched models.

python -m hf_linattn.eval.harness --model DIR --tasks lambada_openai hellaswag --output-dir out
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from hf_linattn.cli.main import exit_status

from ..common.cli import checked, parse_options

EPILOG = """\
examples (`harness` stands for `python -m hf_linattn.eval.harness`):
  # a patched folder, as finetune wrote it
  harness --model tuned --tasks lambada_openai hellaswag arc_easy --batch-size 16 --output-dir out

  # what a patch does before any training, beside the same weights with their own attention
  harness --model DIR --patch elu1 --compare-original --tasks lambada_openai --output-dir out
  harness --model DIR --patch logn --options '{"train_length": 512}' --tasks arc_easy --output-dir out2

  # a fine-tuned folder beside the model that it came from
  harness --model tuned --compare-original original --tasks hellaswag --output-dir out3

  # a task of your own: its .yaml lies in the folder my_tasks
  harness --model DIR --tasks my_task --include-path my_tasks --output-dir out4

  # a first look: 100 documents of each task
  harness --model DIR --tasks hellaswag --limit 100 --output-dir look

  # recall in long prompts: RULER wants its lengths as metadata, and a model that may read them
  harness --model DIR --patch elu1 --tasks niah_single_1 --metadata '{"max_seq_lengths": [4096, 8192]}' \\
      --max-length 8192 --output-dir recall

  # lm_eval's own command line, with the model type hf_linattn
  python -m hf_linattn.eval.harness_cli --model hf_linattn --model_args pretrained=DIR,patch=elu1 \\
      --tasks arc_easy

The folder gets results.json and results.csv. results.json is renewed after every task: the same command goes
on where it stopped. Perplexity of long texts is no task for lm_eval: docs/harness.md says why, and
hf_linattn.eval.perplexity measures it.
"""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _limit(text: str) -> float:
    """Documents, or a share of them below 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf") or (number > 1 and number % 1):
        raise argparse.ArgumentTypeError(f"expected a number of documents, or a share below 1, got {text!r}")
    return number


def _batch_size(text: str) -> str:
    if text != "auto":
        _positive(text)
    return text


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.harness",
        description="Run tasks of the lm-evaluation-harness (package lm_eval) on a patched model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, an_object = parser.add_argument, checked(parse_options)
    add("--model", required=True, help="folder or name of a causal language model, patched or not")
    tasks_help = "tasks or groups of lm_eval by name (`lm_eval ls tasks` lists them), or a task's .yaml"
    add("--tasks", required=True, nargs="+", metavar="TASK", help=tasks_help)
    add("--include-path", type=Path, metavar="DIR", help="folder with more tasks (.yaml)")
    add("--tokenizer", help="folder or name of the tokenizer (default: the model's)")
    add("--patch", help="patch to try on the loaded model, such as elu1; 'unpatched' takes one off")
    add("--options", type=an_object, help="options of --patch as JSON")
    compare_help = (
        "measure the original too: MODEL, or without a name the same weights with their own attention, "
        "which is the original as long as nothing was fine-tuned"
    )
    add("--compare-original", nargs="?", const="unpatched", metavar="MODEL", help=compare_help)
    add("--num-fewshot", type=_count, metavar="N", help="examples in the prompt (default: the task's)")
    add("--limit", type=_limit, help="documents per task, or a share of them below 1 (default: all)")
    add("--batch-size", type=_batch_size, default="1", help="requests per pass, or 'auto' (default: 1)")
    length_help = "tokens a model may read; longer prompts lose their start (default: from its configuration)"
    add("--max-length", type=_positive, help=length_help)
    add(
        "--gen-kwargs",
        type=an_object,
        metavar="JSON",
        help="changes to the generation settings of tasks",
    )
    add(
        "--metadata",
        type=an_object,
        metavar="JSON",
        help="what some tasks want to know, such as RULER",
    )
    add("--apply-chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    bootstrap_help = "resamples for errors that have no formula; 0: none (default: %(default)s, as lm_eval)"
    add("--bootstrap-iters", type=_count, default=100_000, metavar="N", help=bootstrap_help)
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="(default: as saved)")
    add("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    seed_help = "for patches with random parameters, few-shot examples and sampling (default: %(default)s)"
    add("--seed", type=int, default=1234, help=seed_help)
    output_help = "folder for the results; the same command resumes there"
    add("--output-dir", type=Path, required=True, help=output_help)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse, and refuse combinations in which an argument would do nothing."""
    parser = build_parser()
    args = parser.parse_args(argv)
    # lm_eval's own command takes commas as well
    args.tasks = [name for item in args.tasks for name in item.split(",") if name]
    if not args.tasks:
        parser.error("--tasks names no task")
    if len(set(args.tasks)) < len(args.tasks):
        parser.error("--tasks names a task twice")
    if args.options is not None and args.patch is None:
        parser.error("--options belongs to --patch")
    if args.compare_original == args.model and args.patch is None:
        parser.error("--compare-original is the measured model itself")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    command = shlex.join(["python", "-m", "hf_linattn.eval.harness", *argv])

    def work() -> None:
        from .rows import table
        from .run import run

        results = run(args, command)
        if results is not None:
            print(table(results["rows"]))
            print(f"results.json and results.csv in {args.output_dir}")

    told = "the same command goes on after the last finished task"
    process = int(os.environ.get("RANK", "0"))
    return exit_status(work, interrupted=told, extra="harness", process=process, alike=True)


if __name__ == "__main__":
    sys.exit(main())
