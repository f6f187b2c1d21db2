"""Which layers should stay softmax? The layers of a linear model, each measured alone and ranked.

python -m hf_linattn.eval.layers --model DIR --data held-out/ --keep 4 --output-dir out
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_linattn.cli.main import exit_status

from ..common.cli import whole, wholes
from .measure import Measured, Recall
from .ranking import RANKS, SENSES, Ranking, by_recall, plan_for, plan_of
from .schedule import rank_layers

if TYPE_CHECKING:
    from .run import Outcome

__all__ = ["Ranking", "Recall", "main", "plan_for", "plan_of", "rank_layers"]

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

From Python, for a model in memory: from hf_linattn.eval.layers import rank_layers, plan_for

The folder gets results.json, layers.csv (a row per layer), tradeoff.csv, layers.png and tradeoff.png. Each
arrangement of layers is measured once and stored: the same command goes on where it stopped. docs/layers.md
has the formulas and an example.
"""


def _count(text: str) -> int:
    return 0 if text.strip() == "0" else whole(text)


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _budget(text: str) -> int | Literal["all"]:
    return "all" if text == "all" else whole(text)


def _tasks(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names of tasks by comma, or none, got {text!r}")
    return [] if names == ["none"] else names


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.layers",
        description="Put the linear form into each layer alone, measure, and rank which layers stay softmax.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of a causal model that is patched in every layer")
    add("--original", metavar="DIR", help="its original: check that all weights but the patch's are the same")
    add("--tokenizer", help="folder or name of the tokenizer (default: the model's)")
    add("--data", required=True, help="held-out text: file, folder, .jsonl/.json/.parquet/.csv, or a dataset")
    add("--column", default="text", help="text column of a table (default: %(default)s)")
    add("--split", default="train", help="split of a dataset given by name (default: %(default)s)")
    add("--join", action="store_true", help="join the documents, in order, into one")
    bos_help = "BOS before each document: as the tokenizer does, yes, no; or at the start of every window"
    add("--bos", choices=("auto", "yes", "no", "window"), default="auto", help=bos_help)
    add("--length", type=whole, default=512, help="tokens per window, side by side (default: %(default)s)")
    tokens_help = "tokens read for each arrangement, or 'all' (default: %(default)s)"
    add("--max-tokens", type=_budget, default=16384, help=tokens_help)
    add("--batch-size", type=whole, default=1, help="windows per forward pass (default: %(default)s)")
    tasks_help = "tasks of eval.recall, or 'none' (default: induction)"
    add("--tasks", type=_tasks, default=["induction"], metavar="NAMES", help=tasks_help)
    lengths_help = "tokens of context in which recall is asked for (default: --length)"
    add("--recall-lengths", type=wholes, metavar="N,...", help=lengths_help)
    add("--samples", type=whole, default=20, help="questions per length and depth (default: %(default)s)")
    rank_help = "what decides (default: recall_over_perplexity where the original can recall, else kl)"
    add("--rank", choices=RANKS, help=rank_help)
    force_help = "measure and rank by recall although the original can hardly do the task"
    add("--force-recall", action="store_true", help=force_help)
    sense_help = "linear in one layer of the original, or softmax back in one layer of the linear model"
    add("--sense", choices=SENSES, default="replace", help=f"{sense_help} (default: %(default)s)")
    add("--keep", type=_count, metavar="N", help="softmax layers of the plan (default: a quarter, as HALO)")
    curves_help = "ranks in the trade-off: the chosen one, or all; evenly spaced layers are always there"
    add("--curves", choices=("chosen", "all"), default="chosen", help=curves_help)
    add("--counts", type=_counts, metavar="N,...", help="numbers of softmax layers to measure (default: all)")
    nope_help = "also try the kept layers without RoPE, and without RoPE but with log-n"
    add("--nope", action="store_true", help=nope_help)
    add("--train-length", type=whole, help="for log-n in --nope (default: from the configuration)")
    context_help = "tokens for which the state is computed (default: 4096,32768,131072)"
    add("--context", type=wholes, default=[4096, 32768, 131072], metavar="N,...", help=context_help)
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="(default: as saved)",
    )
    add("--seed", type=int, default=0, help="of the questions (default: %(default)s)")
    add("--save", type=Path, metavar="DIR", help="write the model with the plan, learned maps kept, to DIR")
    add(
        "--output-dir",
        type=Path,
        required=True,
        help="folder for the results; the same command resumes there",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.rank is not None and by_recall(args.rank) and not args.tasks:
        parser.error(f"--rank {args.rank} needs recall, and --tasks none measures none")
    if args.force_recall and not args.tasks:
        parser.error("--force-recall has no meaning with --tasks none")
    if args.save is not None and args.nope:
        parser.error("--save writes softmax layers as they were: leave out --nope, what it measured stays")
    if args.save is not None and args.save.resolve() == Path(args.model).resolve():
        parser.error("--save would write over --model, whose maps are wanted for other plans")

    def work() -> None:
        from .run import run

        outcome = run(args, shlex.join(["python", "-m", "hf_linattn.eval.layers", *argv]))
        print(summary(outcome, args))

    return exit_status(work, interrupted="the same command goes on after the last arrangement")


def summary(outcome: Outcome, args: argparse.Namespace) -> str:
    """Tables, the plan, and the sentences one needs to read them."""
    from .outputs import layer_table, tradeoff_table

    ranking, original, linear = outcome.ranking, outcome.original, outcome.linear
    what = {
        "replace": "each layer alone linear, all others the original's",
        "restore": "each layer alone softmax, all others linear",
    }
    lines = [f"{name}: {_line(row)}" for name, row in (("original", original), ("all linear", linear))]
    lines += [f"note: {ranking.note}"] if ranking.note else []
    lines += [f"{what[ranking.sense]}; first to stay softmax first, by {ranking.rank}:", layer_table(ranking)]
    lines += ["state of one sequence, the layers that stay, and perplexity by each way to choose them:"]
    lines += [tradeoff_table(ranking, outcome.points, args.context)]
    lines += [f"plan for patch_model, softmax layers {outcome.keep} of {len(ranking.layers)}:"]
    lines += [json.dumps(plan) for plan in outcome.plans.values()]
    if outcome.sliding != "keep":
        lines.append(f"(with sliding={outcome.sliding!r}, as the folder was patched)")
    lines += [f"nothing was trained; numbers and pictures in {args.output_dir}"]
    return "\n".join(lines + ([f"the model with this plan in {args.save}"] if args.save else []))


def _line(row: Measured) -> str:
    text = f"perplexity {row.perplexity:.5g}, KL {row.kl:.4g}"
    if row.accuracy is None:
        return text
    return f"{text}, recall {row.accuracy:.3f} in {row.samples} samples (chance {row.chance:.2g})"


if __name__ == "__main__":
    sys.exit(main())
