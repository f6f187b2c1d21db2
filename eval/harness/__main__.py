"""Tasks of EleutherAI's lm-evaluation-harness on patched models.

python -m hf_linattn.eval.harness --model DIR --tasks lambada_openai hellaswag --output-dir out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linattn.errors import OptionError

from ..common import cli

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


def _limit(text: str) -> float:
    """Documents, or a share of them below 1."""
    number = cli.parse_float(text)
    if not 0 < number < float("inf") or (number > 1 and number % 1):
        raise argparse.ArgumentTypeError(f"expected a number of documents, or a share below 1, got {text!r}")
    return number


def _batch_size(text: str) -> str:
    return text if text == "auto" else str(cli.positive_int(text))


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = cli.command_parser(
        "harness", "Run tasks of the lm-evaluation-harness (package lm_eval) on a patched model.", EPILOG
    )
    cli.add_model_arguments(
        parser,
        patch="patch to try on the loaded model, such as elu1; 'unpatched' takes one off",
        seed="for patches with random parameters, few-shot examples and sampling",
        default_seed=1234,
    )
    add, an_object = parser.add_argument, cli.argparse_type(cli.json_object)
    tasks_help = "tasks or groups of lm_eval by name (`lm_eval ls tasks` lists them), or a task's .yaml"
    add("--tasks", required=True, nargs="+", metavar="TASK", help=tasks_help)
    add("--include-path", type=Path, metavar="DIR", help="folder with more tasks (.yaml)")
    compare_help = (
        "measure the original too: MODEL, or without a name the same weights with their own attention, "
        "which is the original as long as nothing was fine-tuned"
    )
    add("--compare-original", nargs="?", const="unpatched", metavar="MODEL", help=compare_help)
    shots_help = "examples in the prompt (default: the task's)"
    add("--num-fewshot", type=cli.natural_int, metavar="N", help=shots_help)
    add("--limit", type=_limit, help="documents per task, or a share of them below 1 (default: all)")
    add("--batch-size", type=_batch_size, default="1", help="requests per pass, or 'auto' (default: 1)")
    length_help = "tokens a model may read; longer prompts lose their start (default: from its configuration)"
    add("--max-length", type=cli.positive_int, help=length_help)
    gen_help = "changes to the generation settings of tasks"
    add("--gen-kwargs", type=an_object, metavar="JSON", help=gen_help)
    add("--metadata", type=an_object, metavar="JSON", help="what some tasks want to know, such as RULER")
    add("--apply-chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    bootstrap_help = "resamples for errors that have no formula; 0: none (default: %(default)s, as lm_eval)"
    add("--bootstrap-iters", type=cli.natural_int, default=100_000, metavar="N", help=bootstrap_help)
    add("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    cli.add_output_arguments(parser)
    return parser


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse combinations in which an argument would do nothing."""
    # lm_eval's own command takes commas as well
    args.tasks = [name for item in args.tasks for name in item.split(",") if name]
    if not args.tasks:
        raise OptionError("--tasks names no task")
    if len(set(args.tasks)) < len(args.tasks):
        raise OptionError("--tasks names a task twice")
    if args.compare_original == args.model and args.patch is None:
        raise OptionError("--compare-original is the measured model itself")
    cli.check_options_have_patch(args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

    def work(args: argparse.Namespace, command: str) -> str | None:
        from .run import run

        return run(args, command)

    interrupted = "the same command goes on after the last finished task"
    return cli.run_command(
        build_parser(), work, argv, check=_checked, needs="harness", interrupted=interrupted
    )


if __name__ == "__main__":
    sys.exit(main())
