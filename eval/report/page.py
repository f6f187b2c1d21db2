"""Write the report: a comparison of models as one HTML file, and its table as json and csv."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_linattn.errors import DataError

from ..common.results import machine
from .rows import Comparison

TEMPLATE = Path(__file__).with_name("page.html.j2")
PROMPT_SHOWN = 420
"""Characters from the end of a prompt that the page shows."""


def render(comparison: Comparison, *, title: str, notes: Sequence[str]) -> str:
    """Return the page as HTML, one file without any address in it; `notes` stand below its `title`."""
    from ..common import pages
    from . import diagnosis, figures, findings
    from .table import columns

    curves = [
        {
            "letter": each.letter,
            "lengths": figures.length_curves(comparison, each),
            "buckets": figures.bucket_curves(comparison, each),
            "findings": list(map(pages.markup, findings.findings(comparison, each))),
        }
        for each in comparison.curves
    ]
    diagnoses = diagnosis.collect([item.folder for item in comparison.diagnoses])
    stages = [stage for row in comparison.rows for stage in row.stages]
    return pages.render(
        TEMPLATE,
        title=title,
        notes=list(notes),
        tiles=_tiles(comparison),
        comparison=comparison,
        rows=comparison.rows,
        colours={row.name: figures.style(comparison, row, "var(--ink)")["color"] for row in comparison.rows},
        columns=columns(comparison),
        curves=curves,
        recall=figures.recall_maps(comparison),
        losses=figures.loss_curves(comparison),
        costs=figures.cost_curves(comparison),
        groups={kind: groups.describe() for kind, groups in comparison.groups.items()},
        branch_rows=[row for row in comparison.rows if row.branches],
        prompts=comparison.prompts,
        prompt_shown=PROMPT_SHOWN,
        diagnoses=diagnoses,
        diagnosis_columns=diagnosis.COLUMNS.values(),
        cautions=list(map(pages.markup, findings.cautions(comparison))),
        seeds=sorted({seed for stage in stages if (seed := stage.results.get("seed")) is not None}),
        machine=machine(),
    )


def _tiles(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (value, text) of what all rows have in common, and in how many ways things were measured."""
    rows = comparison.rows
    tiles = [(str(len(rows) or len(comparison.diagnoses)), "models compared")]
    common: dict[str, set[int | None]] = {
        "tokens of training each": {row.tokens for row in rows if row.tokens is not None},
        "tokens scored per length": {point.tokens for row in rows for point in row.points},
        "documents measured on": {curves.data.get("documents") for curves in comparison.curves},
        "tokens: the model's training length": {comparison.train_length},
    }
    for text, values in common.items():
        if len(values) == 1 and (value := values.pop()) is not None:
            tiles.append((f"{value:,}", text))
    ways = {
        "perplexity": "perplexity was measured",
        "recall": "recall was asked",
        "generation": "generation was compared",
        "cost": "cost was measured",
    }
    for kind, groups in comparison.groups.items():
        if len(groups.settings) > 1:
            tiles.append((str(len(groups.settings)), f"different ways in which {ways[kind]}"))
    return tiles


def write_results(path: Path, comparison: Comparison) -> None:
    """Write the table as JSON, and as CSV next to it.

    Raises:
        DataError: there is no row.
    """
    from hf_linattn.cli.files import write_json

    from ..common.results import save_csv
    from .table import flat, lengths_of

    rows = flat(comparison)
    if not rows:
        raise DataError("--results is the table of models, and these folders hold diagnoses only")
    content = {
        "format": "hf_linattn.summary/1",
        "lengths": lengths_of(comparison),
        "train_length": comparison.train_length,
        "rows": rows,
        "asked": {
            kind: dict(groups.describe()) for kind, groups in comparison.groups.items() if groups.settings
        },
        "notes": comparison.notes,
        "versions": comparison.versions,
        "machine": machine(),
        "commands": {row.name: row.commands for row in comparison.rows},
    }
    write_json(path, content)
    save_csv(path.with_suffix(".csv"), rows)
