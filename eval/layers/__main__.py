"""Which layers should stay softmax? The layers of a linear model, each measured alone and ranked.

python -m hf_linattn.eval.layers --model DIR --data held-out/ --keep 4 --output-dir out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linattn.errors import OptionError

from ..common import cli
from .ranking import RANKS, SENSES, by_recall

EPILOG = """\
examples (`layers` stands for `python -m hf_linattn.eval.layers`):
  # DIR has a linear form in every layer, and its other weights are the original's. Which 4 stay softmax?
  layers --model DIR --original ORIGINAL --data held-out/ --keep 4 --output-dir out

  # rank otherwise: what was measured is in out/, so this takes a moment
  layers --model DIR --data held-out/ --keep 4 --rank perplexity --output-dir out

  # every rank in the picture, with some numbers of softmax layers only
  layers --model DIR --data held-out/ --curves all --counts 0,2,4,8,28 --output-dir out

  # recall where it is hard, and the kept layers without RoPE, with log-n and without
  layers --model DIR --data held-out/ --recall-lengths 512,4096 --nope --output-dir out/long

  # write the hybrid: what the layers that stay linear have learned stays
  layers --model DIR --data held-out/ --keep 4 --output-dir out --save hybrid

  # the same for text of any length: the kept layers see 8,192 tokens, the model's context
  layers --model DIR --data held-out/ --keep 4 --output-dir out --save hybrid --window 8188

From Python, for a model in memory: from hf_linattn.eval.layers import rank_layers, plan_for

The folder gets results.json, layers.csv (a row per layer), tradeoff.csv, layers.png and tradeoff.png. Each
arrangement of layers is measured once and stored: the same command goes on where it stopped. docs/layers.md
has the formulas and an example.
"""


def _counts(text: str) -> list[int]:
    return [] if text == "keep" else sorted({cli.natural_int(part) for part in text.split(",")})


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = cli.command_parser(
        "layers",
        "Put the linear form into each layer alone, measure, and rank which layers stay softmax.",
        EPILOG,
    )
    model_help = "folder of a causal model that is patched in every layer"
    cli.add_model_arguments(parser, model_help, seed="of the questions")
    cli.add_text_arguments(parser, data="held-out text")
    add = parser.add_argument
    add("--original", metavar="DIR", help="its original: check that all weights but the patch's are the same")
    length_help = "tokens per window, side by side (default: %(default)s)"
    add("--length", type=cli.positive_int, default=512, help=length_help)
    tokens_help = "tokens read for each arrangement, or 'all' (default: %(default)s)"
    add("--max-tokens", type=cli.token_budget, default=16384, help=tokens_help)
    batch_help = "windows per forward pass (default: %(default)s)"
    add("--batch-size", type=cli.positive_int, default=1, help=batch_help)
    tasks_help = "tasks of hf_linattn.eval.recall, or 'none' (default: induction)"
    tasks = cli.names_of([], "task", none="none")
    add("--tasks", type=tasks, default=["induction"], metavar="NAMES", help=tasks_help)
    lengths_help = "tokens of context in which recall is asked for (default: --length)"
    add("--recall-lengths", type=cli.positive_ints, metavar="N,...", help=lengths_help)
    samples_help = "questions per length and depth (default: %(default)s)"
    add("--samples", type=cli.positive_int, default=20, help=samples_help)
    rank_help = "what decides (default: recall_over_perplexity where the original can recall, logprob with "
    rank_help += "fewer than 20 questions; else kl)"
    add("--rank", choices=RANKS, help=rank_help)
    force_help = "measure and rank by recall although the original can hardly do the task"
    add("--force-recall", action="store_true", help=force_help)
    sense_help = "linear in one layer of the original, or softmax back in one layer of the linear model"
    add("--sense", choices=SENSES, default="replace", help=f"{sense_help} (default: %(default)s)")
    keep_help = "softmax layers of the plan (default: a quarter, as HALO)"
    add("--keep", type=cli.natural_int, metavar="N", help=keep_help)
    curves_help = "ranks in the trade-off, beside evenly spaced layers: all, or one (default: %(default)s)"
    add("--curves", choices=("chosen", "all"), default="chosen", help=curves_help)
    counts_help = "numbers of softmax layers to measure, or 'keep' for that of the plan (default: all)"
    add("--counts", type=_counts, metavar="N,...", help=counts_help)
    nope_help = "also try the kept layers without RoPE, and without RoPE but with log-n"
    add("--nope", action="store_true", help=nope_help)
    train_help = "for log-n in --nope (default: from the configuration)"
    add("--train-length", type=cli.positive_int, help=train_help)
    context_help = "tokens for which the state is computed (default: 4096,32768,131072)"
    contexts = [4096, 32768, 131072]
    add("--context", type=cli.positive_ints, default=contexts, metavar="N,...", help=context_help)
    window_help = "kept layers of the plan and of --save see the last N tokens and 4 sinks, not all: behind "
    window_help += "the model's context, where its softmax breaks, perplexity stays flat and memory constant"
    add("--window", type=cli.positive_int, metavar="N", help=window_help)
    add("--save", type=Path, metavar="DIR", help="write the model with the plan, learned maps kept, to DIR")
    cli.add_output_arguments(parser)
    return parser


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse combinations in which an argument would do nothing."""
    if args.rank is not None and by_recall(args.rank) and not args.tasks:
        raise OptionError(f"--rank {args.rank} needs recall, and --tasks none measures none")
    if args.force_recall and not args.tasks:
        raise OptionError("--force-recall has no meaning with --tasks none")
    if (args.save is not None or args.window is not None) and args.nope:
        raise OptionError(
            "--save and --window leave softmax layers their RoPE: leave out --nope, what it measured stays"
        )
    if args.save is not None and args.save.resolve() == Path(args.model).resolve():
        raise OptionError("--save would write over --model, whose maps are wanted for other plans")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

    def work(args: argparse.Namespace, command: str) -> str:
        from .run import run

        return run(args, command)

    interrupted = "the same command goes on after the last arrangement"
    return cli.run_command(build_parser(), work, argv, check=_checked, interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main())
