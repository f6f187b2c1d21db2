"""The page over result folders: rows, groups and figures of `report_rows` as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linattn.errors import DataError

from ..common.results import machine
from .rows import Compared


def render(compared: Compared, *, title: str, notes: Sequence[str], samples: dict[str, Any]) -> str:
    """The page as HTML: one file without any address in it.

    Args:
        compared: what `report_rows.compare` gives.
        title: heading of the page.
        notes: sentences of the user's, shown below the heading.
        samples: file of the sample command, or nothing.
    """
    from ..common.plotting import COLOURS, GREY
    from . import diagnosis, findings, row_figures
    from .__main__ import PROMPT_SHOWN, environment, markup
    from .figures import bucket_curves, length_curves
    from .table import columns

    found = []
    for group in range(len(compared.groups["perplexity"].settings)):
        summary = row_figures.summary_of(compared, group)
        found.append(
            {
                "mark": compared.groups["perplexity"].mark(group),
                "lengths": length_curves(summary),
                "buckets": bucket_curves(summary),
                "findings": [markup(text) for text in findings.findings(summary)],
            }
        )
    place = row_figures.places(compared)
    colours = {
        row.name: "var(--ink)"
        if row.role == "control"
        else GREY
        if place[row.name] is None
        else COLOURS[place[row.name] % len(COLOURS)]  # type: ignore[operator]
        for row in compared.rows
    }
    folders = [item.folder for item in compared.diagnoses]
    diagnoses = diagnosis.collect(folders) if folders else []
    return str(
        environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            notes=list(notes),
            compared=compared,
            rows=compared.rows,
            colours=colours,
            columns=columns(compared),
            curves=found,
            recall=row_figures.recall_maps(compared),
            losses=row_figures.loss_curves(compared),
            costs=row_figures.cost_curves(compared),
            asked={kind: groups.told() for kind, groups in compared.groups.items()},
            branch_rows=[row for row in compared.rows if row.branches],
            samples=_samples(samples, PROMPT_SHOWN),
            diagnoses=diagnoses,
            diagnosis_columns=diagnosis.COLUMNS.values(),
            versions=compared.versions,
            machine=machine(),
        )
    )


def _samples(content: dict[str, Any], shown: int) -> list[dict[str, Any]]:
    """Prompts, each with what every model wrote."""
    found = []
    for index, text in enumerate(content.get("prompts", [])):
        wrote = [(each["model"], each["text"]) for each in content["samples"] if each["prompt"] == index]
        found.append({"text": text[-shown:], "cut": len(text) > shown, "wrote": wrote})
    return found


def write_results(path: Path, compared: Compared) -> None:
    """The table as JSON, and as CSV beside it.

    Raises:
        DataError: there is no row.
    """
    from hf_linattn.cli.files import write_json

    from ..common.results import save_csv
    from .table import flat

    rows = flat(compared)
    if not rows:
        raise DataError("--results is the table of models, and these folders hold diagnoses only")
    content = {
        "format": "hf_linattn.summary/1",
        "rows": rows,
        "asked": {kind: dict(groups.told()) for kind, groups in compared.groups.items() if groups.settings},
        "notes": compared.notes,
        "versions": compared.versions,
        "machine": machine(),
        "commands": compared.commands,
    }
    write_json(path, content)
    save_csv(path.with_suffix(".csv"), rows)
