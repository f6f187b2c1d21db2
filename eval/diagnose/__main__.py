"""What a model's attention does on a text, per layer and head, in numbers and pictures.

python -m hf_linattn.eval.diagnose --model DIR --data book.txt --length 512 --windows 4 --output-dir out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..common import cli

EPILOG = """\
examples (`diagnose` stands for `python -m hf_linattn.eval.diagnose`):
  # what do the heads of this model look at?
  diagnose --model DIR --data book.txt --output-dir out/unpatched

  # the same after a patch, before any training; and of a fine-tuned folder
  diagnose --model DIR --patch elu1 --data book.txt --output-dir out/elu1
  diagnose --model DIR --patch logn --options '{"train_length": 512}' --data book.txt --output-dir out/logn
  diagnose --model tuned --data book.txt --output-dir out/tuned

  # sinks like to sit on BOS: let it begin every window; and draw these heads (layer:head)
  diagnose --model DIR --data book.txt --bos window --heads 0:0,5:3 --output-dir out

  # all of them on one page
  python -m hf_linattn.eval.report out --output report.html

From Python, for a model in memory: from hf_linattn.eval.diagnose import diagnose

Windows of --length tokens lie side by side, taken evenly from all documents. The folder gets diagnose.json,
diagnose.csv (a row per head), heads.png, entropy.png, attention.png, activations.png and matrices.npz (the
matrices in attention.png). docs/diagnose.md says what each number means. Ranks and entropies want a --dtype
of float32 at least. Time and memory grow with the square of the length: 512 tokens show what there is to see
in most models.
"""


def _heads(text: str) -> list[tuple[int, int]]:
    """Parse heads: `0:1,5:3` -> [(0, 1), (5, 3)]."""
    heads = []
    for part in text.split(","):
        layer, _, head = part.partition(":")
        if not (layer.strip().isdecimal() and head.strip().isdecimal()):
            raise argparse.ArgumentTypeError(f"expected LAYER:HEAD, as in 0:1,5:3, got {part!r}")
        heads.append((int(layer), int(head)))
    return heads


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = cli.command_parser(
        "diagnose",
        "Entropy, sparsity, rank, sinks, scores, activations of every attention head on a text.",
        EPILOG,
    )
    cli.add_model_arguments(
        parser,
        "folder or name of a causal model or an encoder, patched or not",
        patch="patch to try on the loaded model, such as elu1; 'unpatched' takes one off",
        dtype="float32",
        dtypes=("float32", "float64", "auto"),
    )
    cli.add_text_arguments(parser)
    add = parser.add_argument
    add("--length", type=cli.positive_int, default=512, help="tokens per window (default: %(default)s)")
    add("--windows", type=cli.positive_int, default=4, help="windows at most (default: %(default)s)")
    heads_help = "heads to draw (default: up to four of the first, the middle and the last layer)"
    add("--heads", type=_heads, metavar="LAYER:HEAD,...", help=heads_help)
    cli.add_output_arguments(parser, what="folder for the results; older ones are replaced")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

    def work(args: argparse.Namespace, command: str) -> str:
        from .outputs import table
        from .run import run

        diagnosis = run(args, command)
        shape = f"{diagnosis.windows} windows of {diagnosis.length} tokens"
        return f"{table(diagnosis)}\n{shape}; numbers and pictures in {args.output_dir}"

    return cli.run_command(build_parser(), work, argv, check=cli.check_options_have_patch)


if __name__ == "__main__":
    sys.exit(main())
