"""Perplexity against length: does more context help or hurt?

python -m hf_linattn.eval.perplexity --model DIR --data book.txt --lengths 512,...,8192 --output-dir out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Literal, get_args

from hf_linattn.patching.contexts import Branches

from ..common import cli
from ..common.model_specs import add_compare_argument
from .arguments import BRANCHES, LENGTHS, PerplexityArguments

EPILOG = """\
examples (`perplexity` stands for `python -m hf_linattn.eval.perplexity`):
  # does more context help? The same tokens, read with 512, 1024, ... 65536 tokens of context
  perplexity --model DIR --data books/ --lengths 512,...,65536 --output-dir out

  # a patch before any training, beside the weights as they are
  perplexity --model DIR --patch elu1 --baseline unpatched --data book.txt --output-dir out
  perplexity --model DIR --patch logn --options '{"train_length": 512}' --data book.txt --output-dir out2

  # a fine-tuned folder beside its original; the original with its RoPE scaled, in a folder of its own
  perplexity --model tuned --baseline original --data books/ --output-dir out/tuned
  perplexity --model original --rope-scaling yarn:8 --data books/ --output-dir out/yarn

  # many patches of one model side by side: an entry is PATCH[:OPTION=VALUE...][@KIND:FACTOR]
  perplexity --model DIR --data books/ --lengths 512,...,8192 --output-dir out \\
      --compare softmax,softmax@yarn:8,softmax1,logn:train_length=1024,softmax1+logn:kappa=0.2:clip=true

  # a hybrid: what do its window and its linear attention carry? Also before any training, and with the
  # linear attention over all tokens, as it is when it is trained without the window
  perplexity --model tuned --branches --data books/ --lengths 512,...,4096 --output-dir out
  perplexity --model DIR --patch window+elu1 --options '{"size": 64}' --data book.txt --output-dir out \\
      --branches both,window,rest,linear,none

  # plain perplexity: windows side by side, all tokens scored
  perplexity --model DIR --data book.txt --lengths 512 --stride full --max-tokens all --output-dir out

  # a million tokens in constant memory: linear attention only, its state carried through the document
  perplexity --model linear --data books/ --join --stream --max-tokens all --output-dir out

  # several processes share the windows; the sums are the same to the last bit
  accelerate launch --num_processes 2 -m hf_linattn.eval.perplexity --model DIR --data books/ --output-dir out

  # one window over two processes, for texts that are too long for one (docs/context-parallel.md)
  accelerate launch --cpu --num_processes 2 -m hf_linattn.eval.perplexity --model linear --data books/ \\
      --join --lengths 1048576 --stride full --context-parallel --output-dir out

branches:
  both    the hybrid as it is
  window  softmax over the window alone
  rest    the linear attention alone, as the hybrid uses it: over the tokens outside the window
  none    neither
  linear  the linear attention alone, over all tokens

From Python: from hf_linattn.eval.perplexity import PerplexityArguments, perplexity; for a model in memory
hf_linattn.eval.perplexity.measure.measure and hf_linattn.eval.perplexity.compare_branches.

The folder gets results.json, results.csv and perplexity.png (branches.png). results.json is renewed after
every length: the same command goes on where it stopped. docs/perplexity.md says what exactly is measured.
"""


def _stride(text: str) -> int | Literal["full"]:
    return "full" if text == "full" else cli.positive_int(text)


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser, an option per field of `PerplexityArguments`."""
    parser = cli.command_parser(
        "perplexity",
        "Perplexity per token and per byte at several lengths of context, on the same tokens.",
        EPILOG,
    )
    cli.add_model_arguments(
        parser, patch="patch to try on the loaded model, such as elu1; 'unpatched' takes one off"
    )
    cli.add_text_arguments(parser)
    add = parser.add_argument
    lengths = ",".join(map(str, LENGTHS))
    lengths_help = f"tokens per window; '...' doubles (default: {lengths})"
    add("--lengths", type=cli.doubling_range, help=lengths_help)
    stride_help = "score the last STRIDE tokens of each window, or 'full' (default: 256)"
    add("--stride", type=_stride, help=stride_help)
    budget_help = "scored tokens per length, or 'all' (default: %(default)s)"
    add("--max-tokens", type=cli.token_budget, default=65536, help=budget_help)
    add("--batch-size", type=cli.positive_int, help="windows per forward pass (default: 1)")
    add("--stream", action="store_true", help="read documents whole, carrying the state of linear attention")
    add("--segment", type=cli.positive_int, help="tokens per step of --stream (default: 4096)")
    rope_help = "linear, dynamic or yarn, as transformers has them; not for baselines"
    rope_type = cli.argparse_type(cli.parse_rope_scaling, keep_text=True)
    add("--rope-scaling", type=rope_type, metavar="KIND:FACTOR", help=rope_help)
    add_compare_argument(parser, "curves of this one model")
    branches_help = f"parts of a hybrid, each by itself (see below; without names {','.join(BRANCHES)})"
    add(
        "--branches",
        nargs="?",
        type=cli.names_of(get_args(Branches), "branches"),
        const=list(BRANCHES),
        metavar="NAMES",
        help=branches_help,
    )
    baseline_help = "another model, or 'unpatched': the same without --patch and --rope-scaling; repeatable"
    add("--baseline", action="append", default=[], metavar="MODEL", help=baseline_help)
    train_help = "length to mark in the plot (default: from the configuration)"
    add("--train-length", type=cli.positive_int, help=train_help)
    parallel_help = "split each window over all processes, in place of dealing windows out"
    add("--context-parallel", action="store_true", help=parallel_help)
    cli.add_output_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

    def work(arguments: PerplexityArguments, command: str) -> str:
        from .plot import summary
        from .run import perplexity

        return summary(perplexity(arguments, command), arguments)

    return cli.run_command(
        build_parser(),
        work,
        argv,
        check=lambda args: PerplexityArguments(**vars(args)),
        interrupted="the same command goes on after the last finished length",
        share_work=True,
    )


if __name__ == "__main__":
    sys.exit(main())
