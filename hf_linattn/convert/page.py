"""The report page of a conversion: every stage on one page that needs nothing else."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import jinja2

from hf_linattn.cli.files import replacing

LABELS = {"original": "original", "swapped": "patched, untrained"}


def write_page(out: Path) -> None:
    """Write report.html from what the stages have left in `out`."""
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    validation = json.loads((out / "validation.json").read_text(encoding="utf-8"))
    stages = [_stage(out / name) for name in plan["stages"]]
    versions = ", ".join(f"{name} {number}" for name, number in stages[-1]["versions"].items())
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.get_template("report.html.j2").render(
        plan=plan, validation=validation, stages=stages, versions=versions, labels=LABELS, exp=math.exp
    )
    with replacing(out / "report.html") as partial:
        partial.write_text(text, encoding="utf-8")


def _stage(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    picture = base64.b64encode((folder / "loss.png").read_bytes()).decode("ascii")
    return {"layer_losses": {}, **results, "name": folder.name, "picture": picture}
