"""How fast and how large is a patched attention beside softmax, and from how many tokens on is it worth it?

python -m hf_linattn.bench --patches elu1,softmax1 --lengths 256,...,4096 --threads 1 --output-dir out
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from hf_linattn.cli.main import exit_status

from ..common.cli import checked, doubling, parse_options, whole
from .settings import DTYPES, KINDS, PEERS, choices, parse_shapes

EPILOG = """\
examples (`bench` stands for `python -m hf_linattn.bench`):
  # the attention alone, as a patched module runs it, beside torch's fused softmax
  bench --patches elu1,softmax1,window+elu1 --lengths 256,...,8192 --threads 1 --output-dir out/bench

  # sizes of a large model: 32 query heads, 8 key heads of 128; half precision; decoding only
  bench --shapes 1x32/8x128,8x32/8x128 --dtypes bfloat16 --kinds decode --output-dir out/large

  # beside other implementations of elu1, as far as they are installed
  bench --lengths 512,...,4096 --output-dir out/peers --peers

  # a whole model, its own attention against the patch: from how many tokens on is it worth it?
  bench --model DIR --patches elu1 --lengths 1024,...,131072 --budget 20 --output-dir out/model

  # which form of linear attention runs for which size
  bench --explain

  # pages of documentation from finished runs: docs/performance/bench.md and model.md
  bench --docs docs/performance out/bench out/model

What is measured: `prefill` is a forward pass without gradients, `train` forward and backward, `decode` one
token behind a cache of LENGTH tokens, with what the cache itself does. The attention runs inside a module
without projections that is patched like any model; the reference is the same module with transformers'
`sdpa`. In decode a second reference, "sdpa, keys in place", leaves the cache's copying out.

Within a round all candidates take turns, in rotating order; one warm-up round is not counted. A ratio
compares within a round, and the median over --rounds is shown: above 1 is faster. With one thread the ratio
is of the time that the thread was given by the processor, so a busy machine hardly moves it: --threads 1 is
the way to repeatable numbers on a CPU. CUDA is timed by events. What would take longer than --budget seconds
a call, or more memory than is free, is not run, and the results say so.

The folder gets results.json, bench.csv, pictures and report.html. results.json is renewed after every
setting: the same command goes on where it stopped.
"""


INTERRUPTED = "the same command goes on after the last finished setting"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.bench",
        description="Time and memory of patched attention beside softmax, alone or in a whole model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="RUN", help="folders of finished runs, for --docs")
    add("--patches", type=words, metavar="NAME,...", help="patches to measure (default: elu1)")
    add("--options", type=checked(parse_options), help="options of the patches as JSON")
    add(
        "--lengths",
        type=doubling,
        metavar="N,...",
        help="tokens (default: 256,...,4096; a model: 1024,...,131072)",
    )
    shapes_help = "BATCHxHEADS[/KEY_HEADS]xHEAD_DIM[xVALUE_DIM] (default: 1x8x64)"
    add("--shapes", type=parse_shapes, metavar="SHAPE,...", help=shapes_help)
    add("--kinds", type=choices(KINDS), metavar="KIND,...", help="of prefill,train,decode (default: all)")
    dtypes_help = "of " + ",".join(DTYPES) + " (default: float32; a model: as saved)"
    add("--dtypes", type=choices(DTYPES), metavar="DTYPE,...", help=dtypes_help)
    add("--device", default="auto", help="cpu, cuda, ... (default: the accelerator if there is one)")
    add("--bidirectional", action="store_true", help="every query sees all keys, as in encoders")
    peers_help = "also other implementations of elu1: of " + ",".join(PEERS) + " (alone: all of them)"
    add("--peers", type=choices(PEERS), nargs="?", const=list(PEERS), metavar="NAME,...", help=peers_help)
    add("--model", help="folder or name of a causal language model: measure it as a whole")
    add("--batch-size", type=whole, help="sequences side by side, of --model (default: 1)")
    add("--threads", type=whole, help="of torch (default: as many as it takes)")
    add("--rounds", type=whole, default=5, help="that count (default: %(default)s)")
    add(
        "--min-time",
        type=positive,
        default=5.0,
        metavar="MS",
        help="that a sample lasts (default: %(default)s)",
    )
    budget_help = "seconds of one call beyond which it is not run (default: %(default)s)"
    add("--budget", type=positive, default=10.0, metavar="S", help=budget_help)
    cpp_help = "with linear attention in C++, compiled on first use, as HF_LINATTN_CPP=1 has it everywhere"
    add("--cpp", action="store_true", help=cpp_help)
    add("--seed", type=int, default=0, help="of inputs (default: %(default)s)")
    add("--output-dir", type=Path, help="folder for the results; the same command resumes there")
    add("--explain", action="store_true", help="print which form of linear attention runs for which size")
    docs_help = "write or renew the page of each RUN there, named after its --output-dir"
    add("--docs", type=Path, metavar="FOLDER", help=docs_help)
    return parser


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def words(text: str) -> list[str]:
    """Names by comma, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected names by comma, got {text!r}")
    return list(dict.fromkeys(parts))


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Defaults that depend on each other; what does not go together is wrong usage."""
    if args.explain:
        return
    if bool(args.docs) != bool(args.folders):
        parser.error("--docs FOLDER and the folders of finished runs belong together")
    if args.docs:
        return
    if args.output_dir is None:
        parser.error("--output-dir is required")
    if args.model is None:
        if args.batch_size is not None:
            parser.error("--batch-size belongs to --model; a shape has its own")
        args.patches = args.patches or ["elu1"]
        args.shapes = args.shapes or parse_shapes("1x8x64")
        args.dtypes = args.dtypes or ["float32"]
        args.lengths = args.lengths or doubling("256,...,4096")
    else:
        for name in ("shapes", "bidirectional", "peers"):
            if getattr(args, name):
                parser.error(f"--{name} is of the attention alone and does not go with --model")
        if args.dtypes and len(args.dtypes) > 1:
            parser.error("--model takes one dtype at a time")
        args.batch_size = args.batch_size or 1
        args.lengths = args.lengths or doubling("1024,...,131072")
    if args.bidirectional and "decode" in (args.kinds or []):
        parser.error("--bidirectional: there is no decoding where every query sees all keys")
    args.kinds = args.kinds or [kind for kind in KINDS if not (args.bidirectional and kind == "decode")]


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    settle(parser, args)

    def work() -> None:
        if args.explain:
            from hf_linattn.ops.dispatch import explain

            sys.stdout.write(explain().rstrip() + "\n")
        elif args.docs:
            from .docs import write_pages

            for path in write_pages(args.docs, args.folders):
                sys.stdout.write(f"{path} written\n")
        else:
            _measure(args, shlex.join(["python", "-m", "hf_linattn.bench", *argv]))

    return exit_status(work, interrupted=INTERRUPTED, extra="all")


def _measure(args: argparse.Namespace, command: str) -> None:
    from hf_linattn.ops.cpp.build import CPP, asked

    from .run import Run
    from .tables import aligned, refusals, speeds, tokens_per_second

    if args.cpp:
        os.environ[CPP] = "1"
    elif asked():
        args.cpp, command = True, f"{command} --cpp"
    results = Run(args, command).work()
    told = results["run"]
    lines = ["times as fast as softmax"]
    lines += [aligned(table) + "\n" for table in speeds(results["rows"])]
    absolute = tokens_per_second(results["rows"])
    lines += ["tokens per second"] * bool(absolute) + [aligned(table) + "\n" for table in absolute]
    lines += results["answers"]
    lines.append(
        f"{told['device_name']}, threads: {told['threads']}; medians of {args.rounds} rounds, ratios of "
        f"{told['basis']}"
    )
    lines += [f"note: {name}: {note}" for name, note in results["peers"].items()]
    lines += [f"note: {text}" for text in refusals(results["rows"])]
    lines.append(f"numbers, pictures and report.html in {args.output_dir}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
