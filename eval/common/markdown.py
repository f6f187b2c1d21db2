"""Tables that a command writes into a page, between two marks; the words around them stay."""

from __future__ import annotations

from pathlib import Path

from hf_linattn.cli.files import replacing
from hf_linattn.errors import DataError


def between(path: Path, marks: tuple[str, str]) -> str:
    """Read what is between the marks of a page; nothing where there is no page yet.

    Raises:
        DataError: the page is there, and without the marks.
    """
    return _parts(path, marks)[1] if path.exists() else ""


def write_between(path: Path, marks: tuple[str, str], content: str, head: str) -> None:
    """Put a text between the marks of a page.

    Args:
        path: of the page.
        marks: lines before and behind the text.
        content: the text.
        head: how a new page begins.

    Raises:
        DataError: the page is there, and without the marks; it is left as it was.
    """
    before, _, after = _parts(path, marks) if path.exists() else (head, "", "\n")
    begin, end = marks
    with replacing(path) as partial:
        partial.write_text(f"{before}{begin}\n\n{content}\n{end}{after}", encoding="utf-8")


def _parts(path: Path, marks: tuple[str, str]) -> tuple[str, str, str]:
    """Cut a page before, between and behind the marks."""
    begin, end = marks
    before, begun, rest = path.read_text(encoding="utf-8").partition(begin)
    content, ended, after = rest.partition(end)
    if not (begun and ended):
        raise DataError(f"{path} has no lines {begin} and {end}, between which the tables go")
    return before, content, after
