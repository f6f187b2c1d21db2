"""What do the Triton kernels come to? Each compiled for GPUs that need not be there, and read.

python -m hf_linattn.ops.triton.audit --write docs/gpu.md
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linattn.cli.arguments import positive_int, positive_ints
from hf_linattn.cli.files import replacing, write_json
from hf_linattn.cli.main import exit_status
from hf_linattn.errors import DataError, OptionError
from hf_linattn.ops.triton import launch
from hf_linattn.ops.triton.sample_calls import (
    BESIDE,
    CALLS,
    HEAVY,
    LINEAR,
    PREFILL,
    SINKS,
    SPAN,
    WINDOWS,
    Shape,
)
from hf_linattn.ops.triton.targets import TARGETS, Report, compiled

BEGIN, END = "<!-- audit: begin -->", "<!-- audit: end -->"
DTYPES = ("bfloat16", "float16", "float32")
EPILOG = """\
examples (`audit` stands for `python -m hf_linattn.ops.triton.audit`):
  # all kernels for five GPUs, the tables into the page, every number into out/results.json
  audit --write docs/gpu.md --output-dir out

  # while a kernel is being changed: seconds
  audit --targets sm_90 --dtypes bfloat16 --widths 128 --kernels outputs

what it does: asks the launcher for forward, backward and one decoded token at (batch 1, 32 heads, 8,192
tokens), of linear attention and of softmax over a window of 256 tokens with 4 sinks and the sums of a linear
attention (a token: with its state, gated), and, at heads of 64, of both together; takes the launches down
instead of making them, compiles each kernel with the tiles, warps and specialisations of that launch, and
reads the machine code. No GPU is needed and none is used. Compiled kernels stay in triton's cache, so a
second run takes seconds.

what the columns mean:
  registers, spilled   of a thread; spilled bytes go through memory in every pass and should be 0
  KiB                  of shared memory that a program has
  per SM               programs that a multiprocessor (AMD: compute unit) holds at once, by registers, shared
                       memory and threads; with one or two of few warps nothing hides a wait
  products             tensor-core instructions in the machine code, by kind; HGMMA is Hopper's wgmma
  work                 instructions that warps issue per 64 tokens and head in the loop over chunks, counted
                       once each whatever they cost; of a decoded token, and of `accumulate`, of all code; of
                       a window, of the steps over it and of what is outside the loop
  passes               tensors as large as the queries that the launches of a call read or write, float32
                       beside 16 bits counted twice
  host                 microseconds of Python and of triton's binder in a call, without the driver, the best
                       of ten rounds on this machine
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.ops.triton.audit",
        description="Compile every Triton kernel for GPUs that need not be there, and say what came out.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, known, default in (("targets", TARGETS, list(TARGETS)), ("dtypes", DTYPES, list(DTYPES[:2]))):
        text = f"of {', '.join(known)} (default: {', '.join(default)})"
        add(f"--{name}", type=_names, default=default, metavar="NAME,...", help=text)
    add("--widths", type=positive_ints, default=[64, 128], metavar="D,...", help="of heads (default: 64,128)")
    add("--kernels", type=_names, metavar="NAME,...", help="these alone (default: all)")
    add("--feature-map", choices=("elu1", "relu", "none"), default="elu1", help="(default: %(default)s)")
    add("--kv-heads", type=positive_int, default=32, help="of 32 heads (default: %(default)s)")
    add("--decay", action="store_true", help="with decay and packed documents")
    add("--jobs", type=positive_int, default=os.cpu_count(), help="processes (default: one a core)")
    add("--write", type=Path, metavar="PAGE", help="put the tables between the markers of this page")
    add("--output-dir", type=Path, metavar="DIR", help="folder for results.json")
    return parser


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status(lambda: _run(arguments), interrupted="what was compiled is kept", extra="triton")


def _run(arguments: argparse.Namespace) -> None:
    for what, known in (("targets", tuple(TARGETS)), ("dtypes", DTYPES)):
        wrong = [name for name in getattr(arguments, what) if name not in known]
        if wrong:
            raise OptionError(f"--{what} knows {', '.join(known)}, not {', '.join(wrong)}")
    if not launch.available("cuda"):
        raise ModuleNotFoundError(name="triton")
    if max(arguments.widths) > 256:
        raise OptionError(f"--widths: the kernels take heads of at most 256, not {max(arguments.widths)}")
    page = None if arguments.write is None else _page(arguments.write)
    shapes = [
        Shape(
            dtype=dtype,
            D=width,
            Dv=width,
            kv_heads=arguments.kv_heads,
            feature_map=arguments.feature_map,
            linked=arguments.decay,
        )
        for dtype in arguments.dtypes
        for width in arguments.widths
    ]
    cases = [(name, shape) for name in arguments.targets for shape in shapes]
    found = []
    every = arguments.kernels is None
    for case, report in zip(
        cases,
        compiled(cases, kernels=arguments.kernels, timed=every, jobs=arguments.jobs),
        strict=True,
    ):
        sys.stderr.write(f"{case[0]}, {case[1].dtype}, {case[1].D}: {len(report.kernels)} kernels\n")
        found.append((*case, report))
    text = tables(found)
    sys.stdout.write(text)
    if arguments.output_dir is not None:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        write_json(arguments.output_dir / "results.json", {"versions": versions(), "rows": rows(found)})
    if page is not None:
        before, after = page
        with replacing(arguments.write) as partial:
            partial.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def _page(path: Path) -> tuple[str, str]:
    """Read what stands around the tables."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{path} has no lines {BEGIN} and {END}, between which the tables go")
    return before, after


def versions() -> dict[str, str]:
    """Name what compiled."""
    from importlib import metadata

    return {name: metadata.version(name) for name in ("torch", "triton", "hf-linattn")}


def rows(found: Sequence[tuple[str, Shape, Report]]) -> list[dict[str, Any]]:
    """Make a row per target, dtype, width and kernel, and one per call (kernel None), of all numbers."""
    made = []
    for name, shape, report in found:
        about = {"target": name, "device": TARGETS[name].device, **shape._asdict()}
        for kernel in report.kernels:
            own = kernel._asdict() | {"tile": kernel.tile._asdict(), "code": kernel.code._asdict()}
            made.append(about | {"kernel": own.pop("name")} | own)
        for call in CALLS:
            sums = {"work": work(report, call), "host_microseconds": report.host.get(call)}
            sums |= {"launches": report.launches[call], "passes": report.tensors[call]}
            made.append(about | {"kernel": None, "call": call} | sums)
    return made


def work(report: Report, call: str) -> int:
    """Sum up the warp instructions of a call; a kernel that two calls launch counts in both."""
    return sum(kernel.work * kernel.calls.get(call, 0) for kernel in report.kernels)


def tables(found: Sequence[tuple[str, Shape, Report]]) -> str:
    """Write the tables: calls, then kernels by target."""
    triton = versions()["triton"]
    lines = [f"Compiled by triton {triton} at (1, 32, 8192, D). Forward / backward / one token:", ""]
    lines += _calls_table(found, LINEAR)
    if any(report.launches[call] for _, _, report in found for call in WINDOWS):
        lines += [
            "",
            f"Softmax over a window of {SPAN} tokens, {SINKS} sinks and the sums of a linear attention:",
            "",
        ]
        lines += _calls_table(found, WINDOWS)
    if any(report.launches[call] for _, _, report in found for call in PREFILL):
        lines += ["", "Both of a prompt, without gradients. Kernels one after the other / one for both:", ""]
        lines += _calls_table(found, PREFILL)
    if any(report.launches[call] for _, _, report in found for call in HEAVY):
        lines += [
            "",
            f"A window of {SPAN} tokens and heavy hitters. A prompt / its gradients / one token:",
            "",
        ]
        lines += _calls_table(found, HEAVY)
    if any(report.launches[call] for _, _, report in found for call in BESIDE):
        lines += [
            "",
            "Gates made of values / their gradients / a learned map of queries / its gradients:",
            "",
        ]
        lines += _calls_table(found, BESIDE)
    first = found[0][1].dtype
    shown = [case for case in found if case[1].dtype == first]
    names = list(dict.fromkeys(name for name, _, _ in shown))
    lines += [
        "",
        f"In {first}: registers, bytes spilled, KiB, programs per SM; products; work.",
        "",
        f"| kernel | D | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    cells_of: dict[tuple[str, int], dict[str, str]] = {}
    for name, shape, report in shown:
        for kernel in report.kernels:
            code = kernel.code
            products = " ".join(f"{count} {kind}" for kind, count in code.products.items()) or "none"
            numbers = f"{code.registers}, {code.spilled}, {code.shared / 1024:.0f}, {kernel.resident}"
            cells_of.setdefault((kernel.name, shape.D), {})[name] = f"{numbers}; {products}; {kernel.work:,}"
    order = list(dict.fromkeys(kernel for kernel, _ in cells_of))
    for kernel_name, width in sorted(cells_of, key=lambda row: (order.index(row[0]), row[1])):
        row = cells_of[kernel_name, width]
        lines.append(f"| `{kernel_name}` | {width} | {' | '.join(row.get(name, '') for name in names)} |")
    return "\n".join(lines) + "\n"


def _calls_table(found: Sequence[tuple[str, Shape, Report]], calls: Sequence[str]) -> list[str]:
    """Write a row per target, dtype and width, of some calls."""
    lines = [
        "| | D | work | passes | launches | host, us | bytes spilled |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shape, report in found:
        if not any(report.launches[call] for call in calls):
            continue
        own = [kernel for kernel in report.kernels if any(call in kernel.calls for call in calls)]
        cells = [
            " / ".join(f"{work(report, call):,}" for call in calls),
            " / ".join(str(report.tensors[call]) for call in calls[:2]),
            " / ".join(str(report.launches[call]) for call in calls),
            " / ".join(_microseconds(report, call) for call in calls) if report.host else "",
            str(sum(kernel.code.spilled for kernel in own)),
        ]
        about = f"{name} ({TARGETS[name].device}), {shape.dtype}"
        lines.append(f"| {about} | {shape.D} | {' | '.join(cells)} |")
    return lines


def _microseconds(report: Report, call: str) -> str:
    return f"{report.host[call]:.0f}" if call in report.host else "-"


if __name__ == "__main__":
    sys.exit(main())
