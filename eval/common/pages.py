"""Render pages: one HTML file each, which needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from . import formatting


def render(template: Path, **values: Any) -> str:
    """Render a file that may extend `base.html.j2` of this folder; text among the values is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=formatting.number, size=formatting.size)
    return environment.get_template(template.name).render(**values)


def markup(text: str) -> Markup:
    """Return a sentence as HTML: its <b> stays, everything else is escaped."""
    parts = [str(escape(part)) for part in text.replace("</b>", "<b>").split("<b>")]
    return Markup("".join(f"<b>{part}</b>" if index % 2 else part for index, part in enumerate(parts)))
