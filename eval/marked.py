"""Tables that a command writes into a page, between two marks; the words around them stay."""

from __future__ import annotations

from pathlib import Path

from hf_linattn.checkpointing import replacing
from hf_linattn.errors import DataError


def write_between(path: Path, marks: tuple[str, str], content: str, head: str) -> None:
    """Put this between the marks of the page; a new page begins with `head`.

    Raises:
        DataError: the page is there, and without the marks; it is left as it was.
    """
    begin, end = marks
    before, after = head, "\n"
    if path.exists():
        before, begun, rest = path.read_text(encoding="utf-8").partition(begin)
        _, ended, after = rest.partition(end)
        if not (begun and ended):
            raise DataError(f"{path} has no lines {begin} and {end}, between which the tables go")
    with replacing(path) as partial:
        partial.write_text(f"{before}{begin}\n\n{content}\n{end}{after}", encoding="utf-8")
