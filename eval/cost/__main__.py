"""What does a sequence cost? Bytes of cache or state, tokens per second of reading and writing, by length.

python -m hf_linattn.eval.cost --model DIR --lengths 512,2048,8192 --output-dir out
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from hf_linattn.cli.main import exit_status

from ..common.cli import checked, parse_options, whole, wholes

EPILOG = """\
examples (`cost` stands for `python -m hf_linattn.eval.cost`):
  # a patched folder, and in the same run the same model with its own attention
  cost --model tuned --lengths 512,2048,8192 --output-dir out/cost

  # a patch that is only tried: neither bytes nor speed depend on what was learned
  cost --model DIR --patch window+elu1 --options '{"size": 64}' --output-dir out/cost

  # bytes at lengths that nobody has time to run, computed from the tensors of a real cache
  cost --model DIR --patch elu1 --lengths 512 --also 131072,1048576 --output-dir out/cost

What is measured: the text is random tokens. Prefill is one forward pass over LENGTH tokens into an empty
cache, with logits for the last one. Decode is --new-tokens passes of one token each behind it. Both are
tokens per second, the median of --repeats with the lowest and the highest; patched and unpatched take turns,
and one round before the first is not counted. A ratio compares the two within each round, so it can be set
beside that of another run, as tokens per second cannot. `cache` is the size of all tensors in the cache
behind the prefill, `peak` the most memory that they kept alive at any moment.

The folder gets results.json, cost.csv and cost.png. results.json is renewed after every length: the same
command goes on where it stopped. `python -m hf_linattn.eval.report` draws several models on one page.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.cost",
        description="Bytes of cache or state and tokens per second by length, the unpatched model beside it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of a causal language model, patched or not")
    add("--patch", help="patch to try on the loaded model")
    add("--options", type=checked(parse_options), help="options of --patch as JSON")
    lengths_help = "tokens to read, by comma (default: 512,2048,8192)"
    add("--lengths", type=wholes, default=[512, 2048, 8192], metavar="N,...", help=lengths_help)
    also_help = "lengths whose bytes are computed, not run (default: 32768,131072)"
    add("--also", type=wholes, default=[32768, 131072], metavar="N,...", help=also_help)
    add("--new-tokens", type=whole, default=16, help="tokens of decode behind each (default: %(default)s)")
    add("--batch-size", type=whole, default=1, help="sequences side by side (default: %(default)s)")
    add("--repeats", type=whole, default=5, help="counted rounds per length (default: %(default)s)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="(default: as saved)")
    add("--seed", type=int, default=0, help="of the random tokens (default: %(default)s)")
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
        from .run import run, table

        results = run(args, shlex.join(["python", "-m", "hf_linattn.eval.cost", *argv]))
        told = results["run"]
        print(table(results["rows"]))
        print(
            f"batch {args.batch_size}, {told['dtype']}, {told['device']}, {told['threads']} threads; median "
            f"and range of {args.repeats} rounds; ratio: over unpatched in the same round"
        )
        print("".join(f"note: {note}\n" for note in results["notes"]), end="")
        print(f"numbers and plot in {args.output_dir}")

    return exit_status(work, interrupted="the same command goes on after the last finished length")


if __name__ == "__main__":
    sys.exit(main())
