"""Which row is the original and which the control, and whether all were trained alike."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hf_linattn.errors import DataError

from ..common.models import UNPATCHED
from .discover import Found
from .identity import AS_IT_IS, Models
from .summary import Role

if TYPE_CHECKING:
    from .rows import Row


def own_attention(row: Row, models: Models) -> bool | None:
    """Whether a row has the attention that its model came with."""
    if row.variant != AS_IT_IS:
        return row.variant == UNPATCHED
    if any(found.content["arguments"].get("patch") for found in _trained(row)):
        return False
    patched = models.patched(row.key)
    return None if patched is None else not patched


def _trained(row: Row) -> list[Found]:
    return [row.found[kind] for kind in ("finetune", "convert") if kind in row.found]


def give_roles(rows: Sequence[Row], original: str | None, control: str | None) -> list[str]:
    """Give the original and the control their roles; comes back: why one of them has none."""
    notes = []
    bases = {row.base for row in rows if row.stages}
    untrained = [row for row in rows if row.own and not row.stages]
    candidates = {
        "original": [row for row in untrained if row.key in bases] or untrained,
        "control": [row for row in rows if row.own and row.stages],
    }
    given: list[tuple[Role, str | None]] = [("original", original), ("control", control)]
    if original is not None and original == control:
        raise DataError(f"--original and --control both name {original}")
    for role, name in given:
        if name is not None:
            _named(rows, name, role).role = role
            continue
        found = [row for row in candidates[role] if row.name not in (original, control)]
        if len(found) == 1:
            found[0].role = role
        elif found and len(rows) > 1:
            listed = ", ".join(row.name for row in found)
            notes.append(f"Several rows could be the {role} ({listed}): name one with --{role}.")
    return notes


def _named(rows: Sequence[Row], name: str, role: str) -> Row:
    for row in rows:
        if row.name == name:
            return row
    known = [row.name for row in rows]
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"--{role}: no row is called {name!r}.{hint} There are {', '.join(known)}.")


def training_notes(rows: Sequence[Row], models: Models) -> list[str]:
    """Where trained models were not trained alike, so that a difference need not be the attention's."""
    trained = [row for row in rows if row.training]
    first = next((row for row in trained if row.role == "control"), trained[0] if trained else None)
    notes = _base_notes(trained, rows, models)
    for row in trained:
        if first is None or row is first:
            continue
        names = dict.fromkeys([*first.training, *row.training])
        pairs = [(n, row.training.get(n), first.training.get(n)) for n in names]
        if row.training["command"] != first.training["command"]:
            pairs = [pair for pair in pairs if pair[0] in ("command", "model", "data")]
        told = [f"{name} {mine} where {first.name} has {its}" for name, mine, its in pairs if mine != its]
        if row.tokens != first.tokens and not any(text.startswith("tokens") for text in told):
            told.append(f"{row.tokens:,} tokens where {first.name} has {first.tokens:,}")
        if told:
            notes.append(f"{row.name} was trained otherwise than {first.name}: {'; '.join(told)}.")
    return notes


def _base_notes(trained: Sequence[Row], rows: Sequence[Row], models: Models) -> list[str]:
    """Trained models that came from another folder than the original on the page."""
    original = next((row for row in rows if row.role == "original"), None)
    known = {row.key for row in trained}
    return [
        f"{row.name} was trained from {models.folder(str(row.base))}, and the original is {original.name}."
        for row in trained
        if original is not None and row.base not in (original.key, *known)
    ]
