"""The work behind the command: settings in, rows and files out; renewed after every setting."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import set_seed
from transformers.utils import logging

from hf_linattn import describe
from hf_linattn.errors import DataError, OptionError, UnsupportedModelError
from hf_linattn.patching.causality import require_causal

from ..common import results as files
from ..common.models import Curve, load_config, load_model
from ..common.results import machine
from . import memory
from .answers import sentences
from .candidates import check, made, own_options
from .model import Whole
from .operator import Limits, Row, Series
from .outputs import write
from .roofline import Ceiling, ceilings
from .settings import Setting
from .timing import Clock

FORMAT = "hf_linattn.bench/1"
UNRECORDED = ("output_dir", "explain", "docs", "folders")
"""Arguments that say nothing about the numbers."""
PACKAGES = ("hf-linattn", "torch", "transformers", "triton", "flash-linear-attention", "fla-core")


def versions() -> dict[str, str]:
    """Python and the packages that make the numbers, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_of(wanted: str) -> str:
    """The device to measure on.

    Raises:
        OptionError: torch does not know it, or it is not here.
    """
    if wanted == "auto":
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if here is None else here.type
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0]
        raise OptionError(f"--device {wanted}: {line}") from error
    if torch.device(wanted).type == "meta":
        raise OptionError("--device meta computes nothing that could be timed")
    return wanted


def name_of(device: str) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


class Run:
    """One run of the command: what is to be done, what was done.

    Args:
        args: the command's.
        command: as it was typed.

    Raises:
        DataError: the folder holds another run, or one begun on another machine.
        OptionError: a device that is not here.
    """

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.folder = args, args.output_dir
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        self.device = device_of(args.device)
        self.limits = Limits(args.rounds, args.min_time / 1000, args.budget)
        recorded = {key: value for key, value in vars(args).items() if key not in UNRECORDED}
        recorded["shapes"] = [str(shape) for shape in args.shapes or ()]
        earlier = files.load(args.output_dir, recorded, FORMAT)
        here = {
            "device": self.device,
            "device_name": name_of(self.device),
            "machine": machine(),
            "threads": torch.get_num_threads(),
            "basis": Clock(self.device).basis,
            "memory": memory.METHODS.get(torch.device(self.device).type, "not known on this device"),
        }
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
            "versions": versions(),
            "run": here,
            "ceilings": {},
            "peers": {},
            "caches": {},
            "rows": [],
        }
        self.rows: list[Row] = self.results["rows"]
        set_seed(args.seed)

    def work(self) -> dict[str, Any]:
        """Measure what is missing and write all files; the content of results.json comes back."""
        if not self.results["complete"]:
            if self.args.model is None:
                self._micro()
            else:
                self._whole()
            self.results["complete"] = True
        self.results["answers"] = sentences(self.rows, self.results["caches"])
        write(self.folder, self.results)
        return self.results

    def _save(self) -> None:
        files.save(self.folder, self.results)

    def _done(self, kind: str, shape: str, dtype: str, names: list[str]) -> set[int]:
        """Lengths of a series that need no more work."""
        series = [r for r in self.rows if (r["kind"], r["shape"], r["dtype"]) == (kind, shape, dtype)]
        return {row["length"] for row in series if row["candidate"] in names}

    def _settings(self) -> Iterator[list[Setting]]:
        """One list per series, its lengths from short to long."""
        args = self.args
        for dtype in args.dtypes:
            for shape in args.shapes:
                for kind in args.kinds:
                    yield [
                        Setting(shape, kind, length, not args.bidirectional, dtype, self.device)
                        for length in sorted(set(args.lengths))
                    ]

    def _micro(self) -> None:
        args, series = self.args, list(self._settings())
        for spec in args.patches:
            check(spec, args.options or {}, not args.bidirectional)
        for settings in series:  # everything that can be refused is, before anything is measured
            for spec in args.patches:
                made(settings[0], spec, args.options)
        files.check_writable(self.folder)
        with tqdm(total=sum(map(len, series)), desc="bench", unit="setting") as bar:
            for settings in series:
                self._series(settings, bar)

    def _series(self, settings: list[Setting], bar: Any) -> None:
        args, first = self.args, settings[0]
        done = self._done(first.kind, str(first.shape), first.dtype, args.patches)
        bar.update(len(done))
        if len(done) == len(settings):
            return
        known = self.results["ceilings"]
        if first.dtype not in known:
            known[first.dtype] = asdict(ceilings(first.dtype, self.device))
        one = Series(
            args.patches,
            args.options or {},
            self.limits,
            Ceiling(**known[first.dtype]),
            args.seed,
            args.peers or [],
            self.results["peers"],
        )
        keys = (first.kind, str(first.shape), first.dtype)
        one.known([row for row in self.rows if (row["kind"], row["shape"], row["dtype"]) == keys])
        for setting in settings:
            if setting.length not in done:
                bar.set_postfix_str(setting.key)
                self.rows += one.run(setting)
                self._save()
                bar.update()

    def _whole(self) -> None:
        args = self.args
        logging.disable_progress_bar()
        config = load_config(args.model)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{args.model} is an encoder-decoder: reading and writing are measured for decoders"
            )
        lengths = sorted(set(args.lengths))
        for spec in self._specs(config):
            dtype = args.dtypes[0] if args.dtypes else "auto"
            options = args.options or {}
            model = self._load(spec, dtype, options)
            require_causal(model)
            files.check_writable(self.folder)
            label = spec or _label(model)
            name = Path(args.model).name or args.model
            one = Whole(model, label, name, batch=args.batch_size, seed=args.seed, limits=self.limits)
            if (where := one.smaller()) is not None:
                self.results["caches"][label] = asdict(where)
            with tqdm(total=len(args.kinds) * len(lengths), desc=label, unit="setting") as bar:
                for kind in args.kinds:
                    self._lengths(one, label, kind, lengths, bar)

    def _load(self, spec: str | None, dtype: str, options: dict[str, Any]) -> Any:
        own = own_options(spec, options) if spec else {}
        return load_model(Curve(spec or "", self.args.model, spec, own), dtype=dtype, device=self.device)

    def _specs(self, config: Any) -> list[str | None]:
        """The patches to try; None for a folder that is patched already, which is measured as it is."""
        patched, chosen = getattr(config, "linattn", None) is not None, self.args.patches
        if patched and chosen:
            raise OptionError(
                f"{self.args.model} is patched already and is measured as it is, beside its own attention: "
                "leave --patches out, or give the folder that it was made of"
            )
        if patched:
            return [None]
        for spec in chosen or ["elu1"]:
            check(spec, self.args.options or {}, True)
        return list(chosen or ["elu1"])

    def _lengths(self, one: Whole, label: str, kind: str, lengths: list[int], bar: Any) -> None:
        own = [row for row in self.rows if row["kind"] == kind and row["beside"] == label]
        done = {row["length"] for row in own}
        one.known(own)
        bar.update(len(done))
        for length in lengths:
            if length not in done:
                bar.set_postfix_str(f"{kind}, {length} tokens")
                self.rows += [{**row, "beside": label} for row in one.run(kind, length)]
                self._save()
                bar.update()


def _label(model: Any) -> str:
    """The patches of a folder that came patched."""
    return " and ".join(dict.fromkeys(row.patch for row in describe(model).rows if row.patch != "softmax"))
