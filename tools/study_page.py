"""docs/results.md, from the figures that were kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

from study_bases import BASES
from study_commands import training_words
from study_kept import kept_rows
from study_place import Place
from study_plan import KEPT, LENGTHS, rows_of
from study_row import BLOCK, STEPS, Json, Row
from study_softmax import activations, diagnosed_rows, entropies, scale
from study_stages import STAGES
from study_tables import number, spread, table, told

from hf_linattn.eval.marked import write_between

HEAD = "# What conversion keeps\n\n"
INTRODUCTION = """\
Made by `python tools/study.py`, and every figure in it by a command of the package; the commands are at the
end. The figures lie beside this page as .json, and the study goes on from there. Every trained row saw
{tokens:,} tokens if nothing else is said, the control too: the unpatched model, trained further on the same
text. The main rows have three seeds: the mean, and behind it the least and the greatest, as far as they are
measured. Everything else has one.

Perplexity is on held-out text, windows side by side, the same tokens at every length, no special tokens,
float32. "64x / 1x" compares a model with itself; "x control" compares with the control's mean, at the
training length.
"""

LINEAR = ("elu1", "hedgehog", "taylor", "taylor2", "t2r", "performer", "gated")


def _linear(row: Row) -> bool:
    return row.patch in LINEAR and not row.options.get("frozen")


def _hybrid(row: Row) -> bool:
    return isinstance(row.patch, str) and row.patch.startswith("window+")


def _kept(count: int) -> Callable[[Row], bool]:
    """Rows with so many softmax layers, which are in their names."""
    return lambda row: (
        row.name.startswith("kept-") and sum(part.isdigit() for part in row.name.split("-")) == count
    )


CARRYING = 1.5
"""Times both branches, what a hybrid's linear branch has at most where it does its share."""
TARGETS = {
    "books": (
        ("pure linear, any map, x control", "control", _linear, 1.15),
        ("window hybrid (64), x control", "control", _hybrid, 1.01),
        ("window hybrid (64), its linear branch alone over both", "alone", _hybrid, CARRYING),
        ("window hybrid (64) where that is at most 1.5, x control", "carrying", _hybrid, 1.01),
        ("pure linear, 64x over 1x of the same model", "flat", _linear, 1.10),
        ("window hybrid (64), 64x over 1x of the same model", "flat", _hybrid, 1.10),
    ),
    "recall": (
        ("one of six layers softmax, x control", "control", _kept(1), 1.05),
        ("one of six layers softmax, part of the control's recall lost", "lost", _kept(1), 0.10),
        ("two of six layers softmax, x control", "control", _kept(2), 1.05),
        ("two of six layers softmax, part of the control's recall lost", "lost", _kept(2), 0.10),
    ),
    "long": (
        ("pure linear, any map, x control", "control", _linear, 1.05),
        ("window hybrid (64), x control", "control", _hybrid, 1.00),
        ("one of six layers softmax, x control", "control", _kept(1), 1.02),
        ("pure linear, 64x over 1x of the same model", "flat", _linear, 1.03),
        ("window hybrid (64), 64x over 1x of the same model", "flat", _hybrid, 1.03),
        ("one of six layers softmax, 64x over 1x of the same model", "flat", _kept(1), 1.03),
    ),
    "recall-long": (
        ("one of six layers softmax, x control", "control", _kept(1), 1.02),
        ("one of six layers softmax, part of the control's recall lost", "lost", _kept(1), 0.05),
        ("one of six layers softmax, 64x over 1x of the same model", "flat", _kept(1), 1.03),
    ),
}
"""By base: what, which ratio, of which rows, and how much."""

MARKS = "<!-- study: written by tools/study.py -->", "<!-- end of study -->"


def write_page(path: Path, tables: str) -> None:
    """Put the tables into the page, and leave the words around them as they are."""
    write_between(path, MARKS, tables, HEAD)


def page(data: Path, work: Path, figures: Mapping[str, Json]) -> str:
    """The tables as Markdown."""
    parts = [INTRODUCTION.format(tokens=STEPS * 8 * BLOCK)]
    for base in BASES.values():
        place = Place(base, data, work, figures)
        rows = [row for row in rows_of(base, base.tables[:1]) if place.found("perplexity", row)]
        if not rows:
            continue
        parts.append(f"## {base.told[0].upper()}{base.told[1:]}\n")
        parts += _sections(place, rows)
    if "scale" in figures:
        parts += ["## 1 / sqrt(d)\n", scale(figures["scale"])]
    parts.append("## Commands\n\nWhat trained the rows above, seed 0; paths are below W/BASE.\n")
    for base in BASES.values():
        if commands := _commands(Place(base, data, work, figures)):
            parts.append(f"`{base.name}`:\n\n```text\n{commands}\n```\n")
    return "\n".join(parts)


def _sections(place: Place, rows: Sequence[Row]) -> list[str]:
    parts = ["### Perplexity by length\n", _lengths_table(place, rows)]
    parts += ["### By position, in windows of 64x\n", _positions_table(place, rows)]
    if any(place.found("recall", row) for row in rows):
        parts += ["### Recall\n", _recall_table(place, rows)]
    if any(place.found("generation", row) for row in rows):
        parts += ["### Greedy continuations beside the original's\n", _generation_table(place, rows)]
    if next(_branches(place), None):
        parts += ["### The branches of the hybrids\n", _branches_table(place)]
    stages = [row for row in STAGES if place.found("perplexity", row)]
    if not place.base.mains_only and len(stages) > 2:
        parts += ["### What each stage brings\n", _lengths_table(place, stages)]
    if kept := [row for row in kept_rows(place).values() if place.found("perplexity", row)]:
        beside = [*KEPT, *kept]
        parts += ["### Softmax layers kept\n", _lengths_table(place, beside)]
        parts.append(_recall_table(place, beside))
    if diagnosed_rows(place):
        parts += ["### softmax1: activations and attention\n", activations(place)]
    if len(place.base.tables) > 1 and diagnosed_rows(place):
        parts += ["### log-n: entropy in nats by visible keys\n", entropies(place)]
    if targets := _targets(place):
        parts += ["### Targets\n", targets]
    return parts


def _curves(place: Place, row: Row) -> list[dict[int, float]]:
    """By seed: length -> perplexity."""
    found = place.found("perplexity", row)
    return [{int(length): value for length, value in one["lengths"].items()} for one in found]


def _lengths_table(place: Place, rows: Sequence[Row]) -> str:
    first, last = place.base.length, 64 * place.base.length
    lengths = [first << power for power in range(7)]
    control = [curve[first] for curve in _curves(place, LENGTHS[1])]
    body = []
    for row in rows:
        curves = _curves(place, row)
        cells = [spread([curve[length] for curve in curves]) for length in lengths]
        to_control = [curve[first] / mean(control) for curve in curves] if control else []
        flat = [curve[last] / curve[first] for curve in curves]
        body.append([told(row), *cells, spread(to_control), spread(flat), str(len(curves))])
    heads = ["", *(f"{length:,}" for length in lengths), "x control", "64x / 1x", "seeds"]
    return table(heads, body)


def _positions_table(place: Place, rows: Sequence[Row]) -> str:
    edges = [(start, end) for start, end, _ in place.found("perplexity", rows[0])[0]["positions"]]
    body = []
    for row in rows:
        curves = [one["positions"] for one in place.found("perplexity", row)]
        body.append([told(row), *(spread([curve[n][2] for curve in curves]) for n in range(len(edges)))])
    return table(["", *(f"{start:,} to {end:,}" for start, end in edges)], body)


def _recall_table(place: Place, rows: Sequence[Row]) -> str:
    measured = [(row, found) for row in rows for found in place.found("recall", row)[:1]]
    first = measured[0][1]
    keys = [(task, length) for task, values in first["original"].items() for length in values]
    body = [["original", *_percents(first["original"], keys)]]
    body += [[told(row), *_percents(found["row"], keys)] for row, found in measured]
    body.append(["chance", *_percents(first["chance"], keys, digits=2)])
    text = "Percent right, the mean over depths.\n\n"
    return text + table(["", *(f"{task} {int(length):,}" for task, length in keys)], body)


def _percents(found: Json, keys: Sequence[tuple[str, str]], digits: int = 1) -> list[str]:
    return [f"{100 * found[task][length]:.{digits}f}" for task, length in keys]


def _recall_lost(place: Place, rows: Sequence[Row]) -> dict[str, float]:
    """Of the control's induction at the training length, by row."""
    length, found = str(place.base.length), {}
    for row in rows:
        for one in place.found("recall", row)[:1]:
            found[row.name] = one["row"]["induction"][length]
    return {name: 1 - value / found["control"] for name, value in found.items() if found.get("control")}


def _generation_table(place: Place, rows: Sequence[Row]) -> str:
    body = []
    for row in rows:
        for one in place.found("generation", row)[:1]:
            cells = [f"{one['agreement']:.1f}", f"{one['kl']:.3f}", f"{100 * one['top1']:.1f} %"]
            body.append([told(row), *cells, f"{100 * one['repetition']:.1f} %"])
            original = f"{100 * one['original_repetition']:.1f} %"
    body.insert(0, ["original", "-", "-", "-", original])
    heads = ["", "tokens agreed of 128", "KL, nats per token", "same first choice", "repetition"]
    return table(heads, body)


def _branches_table(place: Place) -> str:
    body, heads = [], [""]
    for row, values in _branches(place):
        heads = ["", *values]
        body.append([told(row), *(number(value) for value in values.values())])
    return table(heads, body)


def _branches(place: Place) -> Iterator[tuple[Row, dict[str, float]]]:
    """Hybrids, and the perplexity of each branch."""
    for row in {row.name: row for row in (*rows_of(place.base, place.base.tables), *STAGES)}.values():
        for found in place.found("branches", row)[:1]:
            yield row, found


def _targets(place: Place) -> str:
    """What the rows of table 1 and of the stages reach, of what was hoped for; nothing where nothing was."""
    wanted = TARGETS.get(place.base.name, ())
    first, last = place.base.length, 64 * place.base.length
    rows = [*rows_of(place.base, place.base.tables), *kept_rows(place).values()]
    curves = {row.name: found for row in rows if (found := _curves(place, row))}
    at_first = {name: mean(curve[first] for curve in found) for name, found in curves.items()}
    ratios: dict[str, dict[str, float]] = {
        "alone": {row.name: values["linear"] / values["both"] for row, values in _branches(place)},
        "flat": {name: mean(curve[last] / curve[first] for curve in found) for name, found in curves.items()},
        "control": {
            name: value / at_first["control"] for name, value in at_first.items() if "control" in at_first
        },
        "lost": _recall_lost(place, rows),
    }
    ratios["carrying"] = {
        name: ratios["control"][name]
        for name, alone in ratios["alone"].items()
        if alone <= CARRYING and name in ratios["control"]
    }
    by_name = {row.name: row for row in rows}
    body = []
    for what, kind, counts, target in wanted:
        measured = [name for name in ratios[kind] if counts(by_name[name])]
        if measured:
            best = min(measured, key=lambda name: ratios[kind][name])
            short = ratios[kind][best] - target
            cells = [f"{target:.2f}", f"{ratios[kind][best]:.3f}", told(by_name[best])]
            body.append([what, *cells, "reached" if short <= 0 else f"missed by {short:.3f}"])
    return table(["", "target", "best", "of", ""], body) if body else ""


def _commands(place: Place) -> str:
    """Those of rows that no base above has in the same words."""
    first = next(iter(BASES.values()))
    tables = [table for table in place.base.tables if place.base is first or table not in first.tables]
    lines = []
    for row in [*rows_of(place.base, tables), *kept_rows(place).values()]:
        if row.how != "none" and place.found("perplexity", row):
            words = training_words(place, row, 0)
            lines.append(" ".join(_quoted(_short(word, place)) for word in words))
    return "\n".join(lines)


def _short(word: str, place: Place) -> str:
    for folder, name in ((place.folder, ""), (place.work, "../"), (place.data, "$HF_LINATTN_DATA/")):
        if word.startswith(f"{folder}/"):
            return name + word.removeprefix(f"{folder}/")
    return word


def _quoted(word: str) -> str:
    return f"'{word}'" if '"' in word else word
