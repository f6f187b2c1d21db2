"""The process of one stage: its cases one after the other, a row each, until they are done or time is up."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_check

Row = dict[str, Any]
COMPILING = 0.33
"""Part of a stage's time that compiling in advance may take; the rest is compiled where it is needed."""


@dataclass(frozen=True)
class Context:
    """What the stages know.

    Attributes:
        dry: tiny sizes on the CPU, triton interpreting.
        device: "cuda" or "cpu".
        folder: of the results.
        kit: where model and text lie.
        deadline: on the monotonic clock, when this process has to end.
    """

    dry: bool
    device: str
    folder: Path
    kit: Path
    deadline: float = float("inf")

    @property
    def dtype(self) -> Any:
        """That of the models and of most calls."""
        import torch

        return torch.float32 if self.dry else torch.bfloat16

    def remaining(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        case: what it is, in words and numbers; no other case of the stage has the same.
        run: does it; returns fields of the row. "error" among them, or an exception, is a failure.
        compiles: calls that compile its kernels in processes without a device: functions of a module, and
            their arguments.
    """

    case: Row
    run: Callable[[], Row]
    compiles: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = ()


class Skip(Exception):
    """Raised where a case does not apply here; the row says why, and is no failure."""


def needs_triton(context: Context) -> None:
    """Refuse a case where triton cannot run kernels.

    Raises:
        Skip: it is not installed, or its interpreter does not work here.
    """
    import numpy

    from hf_linattn.ops.triton import launch

    if context.device == "meta":  # of a process that compiles and runs nothing
        return
    if not launch.available(context.device):
        raise Skip("triton is not installed")
    import triton

    old, new = (tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy))
    if context.dry and old < (3, 7) and new >= (2, 4):
        raise Skip(
            f"the interpreter of triton {triton.__version__} does not work with numpy {numpy.__version__}"
        )


@contextmanager
def kernels(wish: str) -> Iterator[None]:
    """Insist on Triton kernels ("1"), turn them off ("0") or leave the choice to the package ("")."""
    before = os.environ.get("HF_LINATTN_TRITON")
    os.environ["HF_LINATTN_TRITON"] = wish
    try:
        yield
    finally:
        del os.environ["HF_LINATTN_TRITON"]
        if before is not None:
            os.environ["HF_LINATTN_TRITON"] = before


def stage(args: Any) -> int:
    """Do one stage in this process; return its exit status."""
    (name,) = args.stages
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    deadline = time.monotonic() + 60 * args.minutes
    context = Context(
        args.dry_run, "cpu" if args.dry_run else "cuda", args.output_dir, gpu_check.HERE, deadline
    )
    return do(name, context, now=args.here, retry=args.retry, only=args.only)


def do(
    name: str,
    context: Context,
    *,
    now: Path | None = None,
    retry: bool = False,
    only: Sequence[str] | None = None,
) -> int:
    """Do the cases of a stage that have no row yet.

    Args:
        name: of the stage.
        context: what the stages know.
        now: file that says which case is under way, for whoever watches this process.
        retry: do failed cases again.
        only: cases that have one of these words; None for all.
    """
    module = importlib.import_module(f"gpu_stages.{name}")
    path = context.folder / f"{name}.jsonl"
    done = {key for key, row in gpu_check.read(path).items() if row["ok"] or not retry}
    cases = [
        each
        for each in module.cases(context)
        if _key(each.case) not in done and (not only or any(words in _words(each.case) for words in only))
    ]
    _compile(path, context, cases)
    latest: dict[tuple[Any, ...], float] = {}
    status = 0
    for index, each in enumerate(cases):
        kind = tuple(each.case.get(name) for name in ("case", "model", "patch", "kernels"))
        # the first of a kind compiles, so the latest one tells more; what takes longer is ended from outside
        if context.remaining() < 1.3 * latest.get(kind, 0) + 5 and not context.dry:
            status = gpu_check.UNFINISHED
            continue
        if now is not None:
            now.write_text(json.dumps({"case": each.case, "began": time.time()}))
        start = time.monotonic()
        row = _row(each)
        latest[kind] = time.monotonic() - start
        gpu_check.append(path, row)
        print(f"[{index + 1}/{len(cases)}] {name} {_line(row)}", flush=True)
        if not row["ok"] and not _alive(context):
            return gpu_check.RESTART
        if now is not None:
            now.unlink()
        _clean(context)
    return status


def _compile(path: Path, context: Context, cases: list[Case]) -> None:
    """Compile what is left to do in parallel, at every start: the machine may be another one."""
    calls = [call for each in cases for call in each.compiles]
    if not calls or context.dry:
        return
    from . import precompile

    row = _row(Case({"case": "precompile"}, lambda: precompile.run(context, calls, COMPILING)))
    gpu_check.append(path, row)
    print(_line(row), flush=True)


def _key(case: Row) -> str:
    return json.dumps(case, sort_keys=True)


def _row(each: Case) -> Row:
    start = time.monotonic()
    try:
        fields = each.run()
    except Skip as why:
        fields = {"skipped": str(why)}
    except Exception as error:  # whatever a compiler, a driver or a device raises is a row
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        place = traceback.extract_tb(error.__traceback__)[-1]
        fields = {
            "error": f"{type(error).__name__}: {text[:400]}",
            "where": f"{place.filename}:{place.lineno} in {place.name}",
        }
    ok = "error" not in fields
    return {"case": each.case, "ok": ok, "seconds": round(time.monotonic() - start, 3), **fields}


def _words(case: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def _line(row: Row) -> str:
    words = _words(row["case"])
    if not row["ok"]:
        return f"{words}: FAILED {row['error'][:200]}"
    skip = ("case", "ok", "seconds")
    found = {
        key: value for key, value in row.items() if key not in skip and not isinstance(value, dict | list)
    }
    texts = (
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in found.items()
    )
    return f"{words}: " + " ".join(texts)


def _alive(context: Context) -> bool:
    """Tell whether the device still answers: after some errors nothing of this process runs on it."""
    if context.device != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item() == 1)
    except RuntimeError:  # as errors of the device are
        print("the device no longer answers: a new process goes on", file=sys.stderr, flush=True)
        return False


def _clean(context: Context) -> None:
    if context.device == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
