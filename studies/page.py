"""The tables of results.md, from the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import commands
from plan import (
    BASES,
    BLOCK,
    CONTROL,
    LENGTHS,
    STEPS,
    TABLES,
    Experiment,
    Json,
    Workspace,
    kept_rows,
    rows_of,
)

from hf_linattn.eval.common.markdown import write_between

HEAD = "# The study of conversions: findings and tables\n\n"
INTRODUCTION = """\
Made by `python studies/run.py`, and every figure in it by a command of the package; the commands are at the
end. The figures lie beside this page as .json, and the study goes on from there. Every trained row saw
{tokens:,} tokens if nothing else is said, the control too: the unpatched model, trained further on the same
text. The main rows have three seeds: the mean, and behind it the least and the greatest, as far as they are
measured. Everything else has one.

Perplexity is on held-out text, windows side by side, the same tokens at every length, no special tokens,
float32. "64x / 1x" compares a model with itself; "x control" compares with the control's mean, at the
training length.
"""
MARKS = "<!-- study: written by studies/run.py -->", "<!-- end of study -->"
FIRST, LAST = LENGTHS[0], LENGTHS[-1]
CARRYING = 1.5
"""Times both branches, what a hybrid's linear branch has at most where it does its share."""
LINEAR = ("elu1", "hedgehog", "taylor", "taylor2", "t2r", "performer", "gated")
DIAGNOSED = {
    "kurtosis, greatest layer": "kurtosis_max",
    "kurtosis, mean": "kurtosis_mean",
    "infinity norm, greatest layer": "inf_norm_max",
    "mass on the first token": "sink",
    "mass in all": "mass",
    "entropy over log n": "relative_entropy",
}
SCALE = {
    "variance": "variance",
    "entropy, nats": "entropy",
    "norm of the Jacobian": "jacobian",
    "share of queries below 0.01": "saturated",
}
SELECTIONS: dict[str, Callable[[Experiment], bool]] = {
    "linear": lambda row: row.patch in LINEAR and not row.options.get("frozen"),
    "delta": lambda row: row.patch == "delta",
    "delta-kept": lambda row: row.name.startswith("delta-kept-"),
    "hybrid": lambda row: isinstance(row.patch, str) and row.patch.startswith("window+"),
    "kept-1": lambda row: _layers_kept(row) == 1,
    "kept-2": lambda row: _layers_kept(row) == 2,
}
"""Rows that a target is about."""


def _layers_kept(row: Experiment) -> int:
    """Softmax layers, which are in the row's name."""
    return sum(part.isdigit() for part in row.name.split("-")) if row.name.startswith("kept-") else 0


def write_page(path: Path, tables: str) -> None:
    """Put the tables into the page, and leave the words around them as they are."""
    write_between(path, MARKS, tables, HEAD)


def page(data: Path, work: Path, figures: Mapping[str, Json]) -> str:
    """Return the tables as Markdown."""
    workspaces = [Workspace(base, data, work, figures) for base in BASES.values()]
    parts = [INTRODUCTION.format(tokens=STEPS * 8 * BLOCK)]
    for workspace in workspaces:
        base = workspace.base
        rows = [row for row in rows_of(base, base.tables[:1]) if workspace.measured("perplexity", row)]
        if rows:
            parts.append(f"## {base.label[0].upper()}{base.label[1:]}\n")
            parts += [part for head, text in _sections(workspace, rows) for part in (f"### {head}\n", text)]
    if "scale" in figures:
        parts += ["## 1 / sqrt(d)\n", _scale_table(figures["scale"])]
    parts.append("## Commands\n\nWhat trained the rows above, seed 0; paths are below W/BASE.\n")
    for workspace in workspaces:
        if lines := _commands(workspace):
            parts.append(f"`{workspace.base.name}`:\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


def _sections(workspace: Workspace, rows: Sequence[Experiment]) -> Iterator[tuple[str, str]]:
    """Headings and tables of a base."""

    def having(measure: str, rows: Sequence[Experiment]) -> list[Experiment]:
        return [row for row in rows if workspace.measured(measure, row)]

    every = rows_of(workspace.base, workspace.base.tables)
    yield "Perplexity by length", _lengths_table(workspace, rows)
    yield "By position, in windows of 64x", _spread_table(workspace, "perplexity", rows, _positions)
    if having("recall", rows):
        yield "Recall", _recall_table(workspace, rows)
    if having("generation", rows):
        yield "Greedy continuations beside the original's", _generation_table(workspace, rows)
    if any(_branches(workspace)):
        yield "The branches of the hybrids", _branches_table(workspace)
    stages = having("perplexity", TABLES["stages"])
    if not workspace.base.main_rows_only and len(stages) > 2:
        yield "What each stage brings", _lengths_table(workspace, stages)
    if "states" in workspace.base.tables and (states := having("perplexity", TABLES["states"])):
        yield "Gates, states that correct themselves", _lengths_table(workspace, states)
    if kept := having("perplexity", [*kept_rows(workspace).values()]):
        shown = [*TABLES["kept"], *kept]
        tables = [_lengths_table(workspace, shown), _recall_table(workspace, shown)]
        yield "Softmax layers kept", "\n".join(tables)
    if diagnosed := having("diagnose", every):
        of_heads = workspace, "diagnose", diagnosed
        yield "softmax1: activations and attention", _spread_table(*of_heads, _activations)
        if len(workspace.base.tables) > 1:
            yield "log-n: entropy in nats by visible keys", _spread_table(*of_heads, _entropies)
    if targets := _targets_table(workspace):
        yield "Targets", targets


def _curves(workspace: Workspace, row: Experiment) -> list[dict[int, float]]:
    """By seed: length -> perplexity."""
    figures = workspace.measured("perplexity", row)
    return [{int(length): value for length, value in each["lengths"].items()} for each in figures]


def _lengths_table(workspace: Workspace, rows: Sequence[Experiment]) -> str:
    control = next(row for row in TABLES["lengths"] if row.name == CONTROL)
    of_control = [curve[FIRST] for curve in _curves(workspace, control)]
    body = []
    for row in rows:
        curves = _curves(workspace, row)
        cells = [spread([curve[length] for curve in curves]) for length in LENGTHS]
        over = [curve[FIRST] / mean(of_control) for curve in curves] if of_control else []
        flat = [curve[LAST] / curve[FIRST] for curve in curves]
        body.append([label(row), *cells, spread(over), spread(flat), str(len(curves))])
    return table(["", *(f"{length:,}" for length in LENGTHS), "x control", "64x / 1x", "seeds"], body)


def _spread_table(
    workspace: Workspace, measure: str, rows: Sequence[Experiment], values: Callable[[Json], dict[str, float]]
) -> str:
    """A column for each of the values: the mean over seeds, the least and the greatest."""
    body, heads = [], [""]
    for row in rows:
        seeds = [values(figures) for figures in workspace.measured(measure, row)]
        heads = ["", *seeds[0]]
        body.append([label(row), *(spread([each[head] for each in seeds]) for head in seeds[0])])
    return table(heads, body)


def _positions(figures: Json) -> dict[str, float]:
    return {f"{start:,} to {end:,}": value for start, end, value in figures["positions"]}


def _activations(figures: Json) -> dict[str, float]:
    return {head: figures[key] for head, key in DIAGNOSED.items()}


def _entropies(figures: Json) -> dict[str, float]:
    return {f"up to {int(keys):,}": value for keys, value in figures["entropy"].items() if int(keys) >= 16}


def _recall_table(workspace: Workspace, rows: Sequence[Experiment]) -> str:
    measured = [(row, seeds) for row in rows if (seeds := workspace.measured("recall", row))]
    first = measured[0][1][0]
    keys = [(task, length) for task, values in first["original"].items() for length in values]

    def percents(seeds: Sequence[Json], digits: int = 1) -> list[str]:
        return [
            spread([100 * each[task][length] for each in seeds], lambda value: f"{value:.{digits}f}")
            for task, length in keys
        ]

    body = [["original", *percents([first["original"]])]]
    body += [[label(row), *percents([each["row"] for each in seeds])] for row, seeds in measured]
    body.append(["chance", *percents([first["chance"]], digits=2)])
    text = "Percent right, the mean over depths.\n\n"
    return text + table(["", *(f"{task} {int(length):,}" for task, length in keys)], body)


def _generation_table(workspace: Workspace, rows: Sequence[Experiment]) -> str:
    body = []
    for row in rows:
        for each in workspace.measured("generation", row)[:1]:
            cells = [f"{each['agreement']:.1f}", f"{each['kl']:.3f}", f"{100 * each['top1']:.1f} %"]
            body.append([label(row), *cells, f"{100 * each['repetition']:.1f} %"])
            original = f"{100 * each['original_repetition']:.1f} %"
    body.insert(0, ["original", "-", "-", "-", original])
    heads = ["", "tokens agreed of 128", "KL, nats per token", "same first choice", "repetition"]
    return table(heads, body)


def _branches(workspace: Workspace) -> Iterator[tuple[Experiment, list[dict[str, float]]]]:
    """Hybrids, and by seed the perplexity of each branch."""
    rows = (*rows_of(workspace.base, workspace.base.tables), *TABLES["stages"])
    for row in {row.name: row for row in rows}.values():
        if seeds := workspace.measured("branches", row):
            yield row, seeds


def _branches_table(workspace: Workspace) -> str:
    rows = [*_branches(workspace)]
    heads = rows[-1][1][0]
    body = [
        [label(row), *(spread([each[head] for each in seeds]) for head in seeds[0])] for row, seeds in rows
    ]
    return table(["", *heads], body)


def _scale_table(figures: Json) -> str:
    rows = figures["rows"]
    body = [[row["kind"], str(row["d"]), *(spread(row[key]) for key in SCALE.values())] for row in rows]
    return table(["scores", "d", *SCALE], body)


def _targets_table(workspace: Workspace) -> str:
    """What the rows reach of what was hoped for; nothing where nothing was."""
    rows = [*rows_of(workspace.base, workspace.base.tables), *kept_rows(workspace).values()]
    by_name, ratios, body = {row.name: row for row in rows}, _ratios(workspace, rows), []
    for target in workspace.base.targets:
        values, chosen, most = ratios[target["ratio"]], SELECTIONS[target["rows"]], target["at_most"]
        if measured := [name for name in values if chosen(by_name[name])]:
            best = min(measured, key=lambda name: values[name])
            missed = values[best] - most
            cells = [target["label"], f"{most:.2f}", f"{values[best]:.3f}", label(by_name[best])]
            body.append([*cells, "reached" if missed <= 0 else f"missed by {missed:.3f}"])
    return table(["", "target", "best", "of", ""], body) if body else ""


def _ratios(workspace: Workspace, rows: Sequence[Experiment]) -> dict[str, dict[str, float]]:
    """By kind of target: row -> ratio.

    control: perplexity at the training length over the control's. flat: 64x over 1x of the same model.
    alone: a hybrid's linear branch over both. carrying: as control, where alone is at most CARRYING. lost:
    part of the control's induction at the training length; lost-256: at 256 tokens. missed-2048: part of it
    that is not found at 2,048 tokens.
    """
    curves = {row.name: each for row in rows if (each := _curves(workspace, row))}
    at_first = {name: mean(curve[FIRST] for curve in each) for name, each in curves.items()}
    flat = {name: mean(curve[LAST] / curve[FIRST] for curve in each) for name, each in curves.items()}
    control = {name: value / at_first[CONTROL] for name, value in at_first.items() if CONTROL in at_first}
    alone = {
        row.name: mean(each["linear"] / each["both"] for each in seeds) for row, seeds in _branches(workspace)
    }
    carrying = {name: control[name] for name in alone if alone[name] <= CARRYING and name in control}
    recall = {row.name: seeds for row in rows if (seeds := workspace.measured("recall", row))}

    def found(name: str, length: int) -> float:
        return mean(each["row"]["induction"][str(length)] for each in recall[name])

    def lost(length: int) -> dict[str, float]:
        of_control = found(CONTROL, length) if CONTROL in recall else 0
        return {name: 1 - found(name, length) / of_control for name in recall} if of_control else {}

    missed = {name: 1 - found(name, 2048) for name in recall}
    ratios = {"control": control, "flat": flat, "alone": alone, "carrying": carrying}
    return {**ratios, "lost": lost(FIRST), "lost-256": lost(256), "missed-2048": missed}


def _commands(workspace: Workspace) -> str:
    """Training commands of rows that no base above has in the same words."""
    base, first = workspace.base, next(iter(BASES.values()))
    tables = [name for name in base.tables if base is first or name not in first.tables]
    lines = []
    for row in [*rows_of(base, tables), *kept_rows(workspace).values()]:
        if row.training != "none" and workspace.measured("perplexity", row):
            words = commands.training(workspace, row, 0)
            lines.append(" ".join(_quoted(_short(word, workspace)) for word in words))
    return "\n".join(lines)


def _short(word: str, workspace: Workspace) -> str:
    """Write a path as below W/BASE."""
    folders = ((workspace.folder, ""), (workspace.work, "../"), (workspace.data, "$HF_LINATTN_DATA/"))
    for folder, name in folders:
        if word.startswith(f"{folder}/"):
            return name + word.removeprefix(f"{folder}/")
    return word


def _quoted(word: str) -> str:
    return f"'{word}'" if '"' in word else word


def label(row: Experiment) -> str:
    """Return what the page calls a row."""
    if row.label:
        return row.label
    text = f"`{row.patch}`" if row.patch else "softmax"
    if row.options:
        text += " (" + ", ".join(f"{name} {value}" for name, value in row.options.items()) + ")"
    if row.rope_scaling:
        text += f", RoPE {row.rope_scaling.replace(':', ' x')}"
    return text + (", not trained" if row.training == "none" else "")


def number(value: float) -> str:
    """Write four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def spread(values: Sequence[float], write: Callable[[float], str] = number) -> str:
    """Write the mean, and behind it the least and the greatest."""
    if not values:
        return "-"
    if len(values) == 1:
        return write(values[0])
    return f"{write(mean(values))} ({write(min(values))} to {write(max(values))})"


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(row)} |" for row in body]
    return "\n".join(lines) + "\n"
