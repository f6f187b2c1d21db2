"""Run the benchmark: what is missing is measured, and all files are renewed after every length."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import set_seed

from hf_linattn import describe
from hf_linattn.cli.files import replacing
from hf_linattn.errors import DataError, OptionError, UnsupportedModelError
from hf_linattn.patching.causality import require_causal

from ..common import pages
from ..common import results as files
from ..common.models import ModelSpec, load_config, load_model
from . import forms, memory, plots, tables
from .break_even import groups, summary
from .candidates import build_bare, check, own_options
from .config import BenchConfig
from .model import ModelSeries, smaller_cache
from .operator import OperatorSeries
from .roofline import Ceiling, ceilings
from .series import COLUMNS, Limits, Row, Series
from .timing import Clock

FORMAT = "hf_linattn.bench/1"
TEMPLATE = Path(__file__).with_name("bench.html.j2")
UNRECORDED = ("output_dir", "explain", "docs", "folders", "cost", "also", "new_tokens")
"""Arguments that say nothing about the numbers."""
PACKAGES = ("hf-linattn", "torch", "transformers", "triton", "flash-linear-attention", "fla-core")


def default_dtype(device: str) -> str:
    """Choose what the attention alone is measured in: what models run in there."""
    return "bfloat16" if torch.device(device).type == "cuda" else "float32"


def device_of(wanted: str) -> str:
    """Return the device to measure on.

    Raises:
        OptionError: torch does not know it, or it is not here.
    """
    if wanted == "auto":
        return files.default_device().type
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0]
        raise OptionError(f"--device {wanted}: {line}") from error
    if torch.device(wanted).type == "meta":
        raise OptionError("--device meta computes nothing that could be timed")
    return wanted


class BenchRun:
    """One run of the command: what is to be done, what was done.

    Raises:
        DataError: the folder holds another run, or one begun on another machine.
        OptionError: a device that is not here.
    """

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.folder = args, args.output_dir
        self.device = device_of(args.device)
        self.limits = Limits(args.rounds, args.min_time / 1000, args.budget)
        recorded = files.recorded(args, *UNRECORDED)
        recorded["shapes"] = [str(shape) for shape in args.shapes or ()]
        earlier = files.load(args.output_dir, recorded, FORMAT)
        kind = torch.device(self.device).type
        here = {
            "device": self.device,
            "device_name": torch.cuda.get_device_name(self.device) if kind == "cuda" else self.device,
            "machine": files.machine(),
            "threads": torch.get_num_threads(),
            "basis": Clock(self.device).basis,
            "memory": memory.METHODS.get(kind, "not known on this device"),
            "kernels": forms.wish(kind),
        }
        if earlier is not None and earlier["run"].get("kernels") != here["kernels"]:
            raise DataError(
                f"{args.output_dir} was measured with other kernels ({earlier['run'].get('kernels')}; now "
                f"{here['kernels']}): choose another --output-dir"
            )
        if earlier is not None and earlier["run"] != here and not earlier["complete"]:
            changed = ", ".join(key for key, value in here.items() if earlier["run"].get(key) != value)
            raise DataError(
                f"{args.output_dir} was begun elsewhere ({changed} differ), and times of two places are no "
                "series: choose another --output-dir"
            )
        self.results: dict[str, Any] = earlier or {
            "format": FORMAT,
            "complete": False,
            "command": command,
            "arguments": recorded,
            "versions": files.versions(PACKAGES),
            "run": here,
            "ceilings": {},
            "peers": {},
            "caches": {},
            "rows": [],
        }
        self.rows: list[Row] = self.results["rows"]
        set_seed(args.seed)

    def work(self) -> dict[str, Any]:
        """Measure what is missing and write all files; return the content of results.json."""
        if not self.results["complete"]:
            (self._measure_operator if self.args.model is None else self._measure_model)()
            self.results["complete"] = True
        self.results["answers"] = summary(self.rows, self.results["caches"])
        _write(self.folder, self.results)
        return self.results

    def _measure_operator(self) -> None:
        args, lengths = self.args, sorted(set(self.args.lengths))
        configs = [
            BenchConfig(shape, kind, lengths[0], not args.bidirectional, dtype, self.device)
            for dtype, shape, kind in product(args.dtypes, args.shapes, args.kinds)
        ]
        # everything that can be refused is, before anything is measured
        check(args.patches, args.options or {}, not args.bidirectional)
        for config, spec in product(configs, args.patches):
            build_bare(config, spec, args.options)
        files.check_writable(self.folder)
        with tqdm(total=len(configs) * len(lengths), desc="bench", unit="setting") as bar:
            for config in configs:
                keys = (config.kind, str(config.shape), config.dtype)
                rows = [row for row in self.rows if (row["kind"], row["shape"], row["dtype"]) == keys]
                done = {row["length"] for row in rows if row["candidate"] in args.patches}
                if len(done) == len(lengths):
                    bar.update(len(done))
                    continue
                known = self.results["ceilings"]
                if config.dtype not in known:
                    known[config.dtype] = asdict(ceilings(config.dtype, self.device))
                series = OperatorSeries(
                    *(config, args.patches, args.options or {}, self.limits, Ceiling(**known[config.dtype])),
                    seed=args.seed,
                    peers=args.peers or [],
                    notes=self.results["peers"],
                )
                self._measure_series(series, rows, done, bar)

    def _measure_model(self) -> None:
        args, lengths = self.args, sorted(set(self.args.lengths))
        config = load_config(args.model)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{args.model} is an encoder-decoder: reading and writing are measured for decoders"
            )
        for spec in self._specs(config):
            own = own_options(spec, args.options) if spec else {}
            dtype = args.dtypes[0] if args.dtypes else "auto"
            model = load_model(ModelSpec(spec or "", args.model, spec, own), dtype=dtype, device=self.device)
            require_causal(model)
            files.check_writable(self.folder)
            label, name = spec or _label(model), Path(args.model).name or args.model
            if (where := smaller_cache(model, args.batch_size, args.seed)) is not None:
                self.results["caches"][label] = asdict(where)
            with tqdm(total=len(args.kinds) * len(lengths), desc=label, unit="setting") as bar:
                for kind in args.kinds:
                    rows = [row for row in self.rows if row["kind"] == kind and row["beside"] == label]
                    sizes = {"batch": args.batch_size, "seed": args.seed}
                    series = ModelSeries(model, kind, label, name, **sizes, limits=self.limits)
                    self._measure_series(series, rows, {row["length"] for row in rows}, bar)

    def _measure_series(self, series: Series, rows: list[Row], done: set[int], bar: Any) -> None:
        """Measure the lengths that are not done, and save after each; `rows` are of an earlier run."""
        series.known(rows)
        bar.update(len(done))
        way = "" if series.head["causal"] else ", both ways"
        name = " ".join(series.head[key] for key in ("kind", "shape", "dtype")) + way
        for length in sorted({*self.args.lengths} - done):
            bar.set_postfix_str(f"{name} {length}")
            self.rows += series.run(length)
            files.save(self.folder, self.results)
            bar.update()

    def _specs(self, config: Any) -> list[str | None]:
        """Return the patches to try; None for a folder that is patched already, measured as it is."""
        patched, chosen = getattr(config, "linattn", None) is not None, self.args.patches
        if patched and chosen:
            raise OptionError(
                f"{self.args.model} is patched already and is measured as it is, beside its own attention: "
                "leave --patches out, or give the folder that it was made of"
            )
        if patched:
            return [None]
        specs = chosen or ["elu1"]
        check(specs, self.args.options or {}, True)
        return [*specs]


def _label(model: Any) -> str:
    """Name the patches of a folder that came patched."""
    return " and ".join(dict.fromkeys(row.patch for row in describe(model).rows if row.patch != "softmax"))


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    """Write everything that is read off the rows, each file in one step; results.json last."""
    rows = results["rows"]
    files.save_csv(folder / "bench.csv", rows, COLUMNS)
    plots.save_plots(folder, rows)
    page = pages.render(
        TEMPLATE,
        title="Speed and memory compared with softmax",
        results=results,
        speeds=tables.speeds(rows, spread=True),
        memories=tables.memories(rows),
        shares=tables.shares(rows),
        absolute=tables.tokens_per_second(rows),
        caches=tables.caches(rows),
        refusals=tables.refusals(rows),
        other=[f"{name}: {note}" for name, note in results["peers"].items()],
        figures=[(plots.group_text(group), plots.pictures(rows, group)) for group in groups(rows)],
    )
    with replacing(folder / "report.html") as partial:
        partial.write_text(page, encoding="utf-8")
    files.save(folder, results)


def text(results: Mapping[str, Any], folder: Path) -> str:
    """Return what the command prints: tables, break-even lengths, notes."""
    rows, run = results["rows"], results["run"]
    lines = ["times as fast as softmax", *(f"{tables.aligned(table)}\n" for table in tables.speeds(rows))]
    if absolute := tables.tokens_per_second(rows):
        lines += ["tokens per second", *(f"{tables.aligned(table)}\n" for table in absolute)]
    lines += results["answers"]
    rounds = f"medians of {results['arguments']['rounds']} rounds, ratios of {run['basis']}"
    lines.append(f"{run['device_name']}, threads: {run['threads']}; {rounds}")
    ran = dict.fromkeys((row["candidate"], row["form"]) for row in rows if row.get("form"))
    lines += [f"{candidate}: {form}" for candidate, form in ran]
    lines += [f"note: {name}: {note}" for name, note in results["peers"].items()]
    lines += [f"note: {note}" for note in tables.refusals(rows)]
    return "\n".join([*lines, f"numbers, pictures and report.html in {folder}"])
