"""Compare patched attention with softmax in time and memory: from how many tokens on is it worth it?

python -m hf_linattn.bench --patches elu1,softmax1 --lengths 256,...,4096 --threads 1 --output-dir out
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linattn.cli.arguments import positive_number, seed
from hf_linattn.errors import OptionError, UnsupportedCallError

from ..common.cli import (
    argparse_type,
    doubling_range,
    json_object,
    names_of,
    positive_int,
    positive_ints,
    run_command,
)
from .config import DTYPES, KINDS, PEERS, choices, parse_shapes

EPILOG = """\
examples (`bench` stands for `python -m hf_linattn.bench`):
  # the attention alone, as a patched module runs it, and torch's fused softmax
  bench --patches elu1,softmax1,window+elu1 --lengths 256,...,8192 --threads 1 --output-dir out/bench

  # sizes of a large model: 32 query heads, 8 key heads of 128; half precision; decoding only
  bench --shapes 1x32/8x128,8x32/8x128 --dtypes bfloat16 --kinds decode --output-dir out/large

  # also other implementations of elu1, as far as they are installed
  bench --lengths 512,...,4096 --output-dir out/peers --peers

  # a whole model, its own attention against the patch: from how many tokens on is it worth it?
  bench --model DIR --patches elu1 --lengths 1024,...,131072 --budget 20 --output-dir out/model

  # what a sequence costs: bytes of cache or state, also at lengths that nobody has time to run
  bench --model tuned --cost --lengths 512,2048,8192 --also 131072,1048576 --output-dir out/cost
  bench --model DIR --cost --patches window+elu1 --options '{"size": 64}' --output-dir out/cost

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
is of the time that the processor gave to the thread, so a busy machine hardly moves it: --threads 1 is
the way to repeatable numbers on a CPU. CUDA is timed by events. What would take longer than --budget seconds
a call, or more memory than is free, is not run, and the results say so. What fails is a row that says why.
Of linear attention on a GPU the rows name the form that ran.

With --cost the model and itself with its own attention (`unpatched`) take turns: prefill is one forward pass
over LENGTH random tokens into an empty cache, decode --new-tokens passes of one token behind it, both in
tokens per second; `cache` is the size of all tensors in the cache behind the prefill, `peak` the most memory
that they kept alive at any moment. The folder gets results.json, cost.csv and cost.png, and
hf_linattn.eval.report draws several models on one page.

Else the folder gets results.json, bench.csv, pictures and report.html. results.json is renewed after every
setting: the same command goes on where it stopped.
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.bench",
        description="Time and memory of patched attention compared with softmax, alone or in a whole model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="RUN", help="folders of finished runs, for --docs")
    patches_help = "patches to measure (default: elu1; with --cost at most one, default none)"
    add("--patches", type=names_of((), "patch"), metavar="NAME,...", help=patches_help)
    add("--options", type=argparse_type(json_object), help="options of the patches as JSON")
    lengths_help = "tokens (default: 256,...,4096; a model: 1024,...,131072; --cost: 512,2048,8192)"
    add("--lengths", type=doubling_range, metavar="N,...", help=lengths_help)
    shapes_help = "BATCHxHEADS[/KEY_HEADS]xHEAD_DIM[xVALUE_DIM] (default: 1x8x64)"
    add("--shapes", type=parse_shapes, metavar="SHAPE,...", help=shapes_help)
    add("--kinds", type=choices(KINDS), metavar="KIND,...", help="of prefill,train,decode (default: all)")
    dtypes_help = "of " + ",".join(DTYPES) + " (default: float32, bfloat16 on CUDA; a model: as saved)"
    add("--dtypes", type=choices((*DTYPES, "auto")), metavar="DTYPE,...", help=dtypes_help)
    add("--device", default="auto", help="cpu, cuda, ... (default: the accelerator if there is one)")
    add("--bidirectional", action="store_true", help="every query sees all keys, as in encoders")
    peers_help = "also other implementations of elu1: of " + ",".join(PEERS) + " (alone: all of them)"
    add("--peers", type=choices(PEERS), nargs="?", const=list(PEERS), metavar="NAME,...", help=peers_help)
    add("--model", help="folder or name of a causal language model: measure it as a whole")
    cost_help = "of --model: bytes of its cache or state and tokens per second of prefill and decode"
    add("--cost", action="store_true", help=cost_help)
    also_help = "with --cost: lengths whose bytes are computed, not run (default: 32768,131072)"
    add("--also", type=positive_ints, metavar="N,...", help=also_help)
    new_help = "with --cost: tokens of decode behind each length (default: 16)"
    add("--new-tokens", type=positive_int, help=new_help)
    add("--batch-size", type=positive_int, help="sequences side by side, of --model (default: 1)")
    add("--threads", type=positive_int, help="of torch (default: as many as it takes)")
    add("--rounds", "--repeats", type=positive_int, default=5, help="that count (default: %(default)s)")
    add("--min-time", type=positive_number, metavar="MS", help="that a sample lasts (default: 5)")
    budget_help = "seconds of one call beyond which it is not run (default: 10)"
    add("--budget", type=positive_number, metavar="S", help=budget_help)
    cpp_help = "with kernels in C++, compiled if need be, or without (default: as HF_LINATTN_CPP has it)"
    add("--cpp", action=argparse.BooleanOptionalAction, help=cpp_help)
    add("--seed", type=seed, default=0, help="of inputs (default: %(default)s)")
    add("--output-dir", type=Path, help="folder for the results; the same command resumes there")
    add("--explain", action="store_true", help="print which form of linear attention runs for which size")
    docs_help = "write or renew the page of each RUN there, named after its --output-dir"
    add("--docs", type=Path, metavar="FOLDER", help=docs_help)
    return parser


def _check_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse what does not go together, and fill in defaults that depend on each other."""
    if args.explain:
        return args
    if bool(args.docs) != bool(args.folders):
        raise OptionError("--docs FOLDER and the folders of finished runs belong together")
    if args.docs:
        return args
    if args.output_dir is None:
        raise OptionError("--output-dir is required")
    if args.dtypes == ["auto"] and args.model is not None:
        args.dtypes = None
    if args.cost:
        _check_cost(args)
        return args
    _refuse(args, ("also", "new_tokens"), "belongs to --cost")
    args.min_time, args.budget = args.min_time or 5.0, args.budget or 10.0
    if "auto" in (args.dtypes or []):
        raise OptionError("--dtypes auto is the dtype that a --model was saved with, and stands alone")
    if args.model is None:
        _refuse(args, ["batch_size"], "belongs to --model; a shape has its own")
        args.patches = args.patches or ["elu1"]
        args.shapes = args.shapes or parse_shapes("1x8x64")
        args.lengths = args.lengths or doubling_range("256,...,4096")
    else:
        alone = ("shapes", "bidirectional", "peers")
        _refuse(args, alone, "is of the attention alone and does not go with --model")
        if args.dtypes and len(args.dtypes) > 1:
            raise OptionError("--model takes one dtype at a time")
        args.batch_size = args.batch_size or 1
        args.lengths = args.lengths or doubling_range("1024,...,131072")
    if args.bidirectional and "decode" in (args.kinds or []):
        raise OptionError("--bidirectional: there is no decoding where every query sees all keys")
    args.kinds = args.kinds or [kind for kind in KINDS if not (args.bidirectional and kind == "decode")]
    return args


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(args, name):
            raise OptionError(f"--{name.replace('_', '-')} {why}")


def _check_cost(args: argparse.Namespace) -> None:
    """Refuse, of --cost, what belongs to the other ways to measure."""
    if args.model is None:
        raise OptionError("--cost is of a whole model: give --model")
    others = ("shapes", "kinds", "bidirectional", "peers", "min_time", "budget")
    _refuse(args, others, "does not go with --cost")
    for name in ("patches", "dtypes"):
        if len(getattr(args, name) or []) > 1:
            raise OptionError(f"--cost takes one of --{name} at a time")
    if args.options is not None and not args.patches:
        raise OptionError("--options belongs to --patches")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    interrupted = "the same command goes on after the last finished setting"
    return run_command(
        build_parser(), _work, argv, check=_check_arguments, needs="all", interrupted=interrupted
    )


def _work(args: argparse.Namespace, command: str) -> str:
    """Explain, write a page, or measure; return what is printed."""
    if args.explain:
        from hf_linattn.ops.dispatch import explain

        return explain().rstrip()
    if args.docs:
        from .docs import write_pages

        return "\n".join(f"{path} written" for path in write_pages(args.docs, args.folders))
    import torch

    from . import cost, run

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = run.device_of(args.device)
    command = _choose_kernels(args, command, torch.device(device).type == "cpu")
    if args.model is None:
        args.dtypes = args.dtypes or [run.default_dtype(device)]
    if args.cost:
        return cost.summary(cost.run(args, command, device), args.output_dir)
    return run.text(run.BenchRun(args, command).work(), args.output_dir)


def _choose_kernels(args: argparse.Namespace, command: str, used: bool) -> str:
    """Let the arguments and the command say which kernels are measured, whoever chose them."""
    from hf_linattn.ops.cpp import build
    from hf_linattn.ops.dispatch import kernels

    if args.cpp is not None:
        os.environ[build.CPP] = str(int(args.cpp))
    if build.asked() == "1" and used:
        try:
            build.library()  # compiled before anything is timed, or refused
        except UnsupportedCallError as error:
            why = str(error).partition(" Or unset ")[0]  # with --cpp it is not the variable that asks
            raise UnsupportedCallError(f"{why} Or give --no-cpp.") from error
    chosen, args.cpp = args.cpp, used and kernels()["cpu"].startswith("cpp")
    return command if not used or chosen is not None else f"{command} --{'' if args.cpp else 'no-'}cpp"


if __name__ == "__main__":
    sys.exit(main())
