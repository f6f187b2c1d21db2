"""What a model's attention does on a text, per layer and head, in numbers and pictures.

python -m hf_linattn.eval.diagnose --model DIR --data book.txt --length 512 --windows 4 --output-dir out
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from hf_linattn.cli.main import exit_status

from ..common.cli import checked, parse_options, whole
from .measure import diagnose

__all__ = ["diagnose", "main"]

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
matrices in attention.png). docs/diagnose.md says what each number means. Time and memory grow with the square
of the length: 512 tokens show what there is to see in most models.
"""


def _heads(text: str) -> list[tuple[int, int]]:
    """`0:1,5:3` -> [(0, 1), (5, 3)]."""
    found = []
    for part in text.split(","):
        layer, _, head = part.partition(":")
        if not (layer.strip().isdecimal() and head.strip().isdecimal()):
            raise argparse.ArgumentTypeError(f"expected LAYER:HEAD, as in 0:1,5:3, got {part!r}")
        found.append((int(layer), int(head)))
    return found


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.diagnose",
        description="Entropy, sparsity, rank, sinks, scores, activations of every attention head on a text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of a causal model or an encoder, patched or not")
    add("--tokenizer", help="folder or name of the tokenizer (default: the model's)")
    add("--data", required=True, help="text file, folder, .jsonl/.json/.parquet/.csv, or a dataset's name")
    add("--column", default="text", help="text column of a table (default: %(default)s)")
    add("--split", default="train", help="split of a dataset given by name (default: %(default)s)")
    add("--join", action="store_true", help="join the documents, in order, into one")
    bos_help = "BOS before each document: as the tokenizer does, yes, no; or at the start of every window"
    add("--bos", choices=("auto", "yes", "no", "window"), default="auto", help=bos_help)
    add("--length", type=whole, default=512, help="tokens per window (default: %(default)s)")
    add("--windows", type=whole, default=4, help="windows at most (default: %(default)s)")
    add("--patch", help="patch to try on the loaded model, such as elu1; 'unpatched' takes one off")
    add("--options", type=checked(parse_options), help="options of --patch as JSON")
    heads_help = "heads to draw (default: up to four of the first, the middle and the last layer)"
    add("--heads", type=_heads, metavar="LAYER:HEAD,...", help=heads_help)
    dtype_help = "of the model; ranks and entropies want float32 at least (default: %(default)s)"
    add("--dtype", choices=("float32", "float64", "auto"), default="float32", help=dtype_help)
    add("--seed", type=int, default=0, help="for patches with random parameters (default: %(default)s)")
    add("--output-dir", type=Path, required=True, help="folder for the results; older ones are replaced")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.options is not None and args.patch is None:
        parser.error("--options belongs to --patch")

    def work() -> None:
        from .outputs import table
        from .run import run

        found = run(args, shlex.join(["python", "-m", "hf_linattn.eval.diagnose", *argv]))
        print(table(found))
        print(f"{found.windows} windows of {found.length} tokens; numbers and pictures in {args.output_dir}")

    return exit_status(work, interrupted="nothing was written")


if __name__ == "__main__":
    sys.exit(main())
