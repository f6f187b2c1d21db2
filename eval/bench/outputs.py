"""Files of a run: bench.csv, pictures, the page; results.json last, which says that the others are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from hf_linattn.cli.files import replacing

from ..common import results as files
from . import tables
from .answers import groups
from .operator import COLUMNS
from .plots import pictures, save_plots, told


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """Write everything that is read off the rows, each file in one step."""
    rows = results["rows"]
    files.save_csv(folder / "bench.csv", rows, COLUMNS)
    save_plots(folder, rows)
    with replacing(folder / "report.html") as partial:
        partial.write_text(page(results), encoding="utf-8")
    files.save(folder, results)


def page(results: Mapping[str, Any]) -> str:
    """The report as HTML that needs nothing else."""
    rows = results["rows"]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("bench.html.j2").render(
        results=results,
        answers=results["answers"],
        speeds=tables.speeds(rows, spread=True),
        memories=tables.memories(rows),
        shares=tables.shares(rows),
        absolute=tables.tokens_per_second(rows),
        caches=tables.caches(rows),
        refusals=tables.refusals(rows),
        figures=[(told(group), pictures(rows, group)) for group in groups(rows)],
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
    )
