"""What `eval.layers` leaves behind: results.json, from which it resumes, two tables, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_linattn.errors import DataError

from ..common.formatting import size, text_table
from .measure import Key, Measured, key_of
from .model import OWN
from .ranking import Ranking, ordered, single_layer

FORMAT = "hf_linattn.layers/1"
Point = dict[str, Any]
"""Of `Schedule.tradeoff`: "curve", "kept", "count" and "key"."""


def rows_from(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[Key, Measured]:
    """Read the rows of results.json.

    Raises:
        DataError: they are damaged.
    """
    try:
        read = [Measured(**{**row, "own": tuple(row["own"])}) for row in rows]
    except (KeyError, TypeError) as error:
        path = folder / "results.json"
        raise DataError(f"{path} is damaged ({error}); delete it to measure again") from error
    return {row.key: row for row in read}


def layer_rows(ranking: Ranking) -> list[dict[str, Any]]:
    """Make the rows of layers.csv: each layer alone, its scores and its places by every rank."""
    layers, worth = ranking.layers, ranking.layer_values
    orders = {rank: ordered(layers, scores, worth) for rank, scores in ranking.scores.items()}
    rows = []
    for index, (layer, own) in enumerate(zip(layers, single_layer(layers, ranking.sense), strict=True)):
        measured = ranking.rows[key_of(own)]
        row: dict[str, Any] = {"layer": layer.number, "module": layer.module, "patch": layer.patch}
        row |= {name: getattr(measured, name) for name in ("perplexity", "stderr", "nats", "kl", "kl_stderr")}
        row |= {"recall": measured.accuracy}
        row |= {f"worth_{name}": values[index] for name, values in ranking.layer_values.items()}
        row |= {f"score_{rank}": scores[index] for rank, scores in ranking.scores.items()}
        row |= {f"place_{rank}": order.index(layer.number) + 1 for rank, order in orders.items()}
        rows.append(row)
    return rows


def tradeoff_rows(ranking: Ranking, points: Sequence[Point], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Make the rows of tradeoff.csv: each number of softmax layers by each curve."""
    rows = []
    for point in points:
        measured = ranking.rows[point["key"]]
        row = {"curve": point["curve"], "kept": point["kept"], "softmax_layers": point["count"]}
        row |= {"layers": " ".join(map(str, measured.own))}
        row |= {name: getattr(measured, name) for name in ("perplexity", "stderr", "nats", "kl")}
        row |= {"recall": measured.accuracy}
        lengths = sorted({part["length"] for part in measured.recall or []})
        row |= {f"recall_{length}": measured.accuracy_at(length) for length in lengths}
        row |= {f"bytes_{n}": ranking.state_bytes(measured.own, n) for n in contexts}
        rows.append(row)
    return rows


def label(curve: str, kept: str) -> str:
    """Name a curve of the trade-off."""
    return curve if kept == OWN else f"{curve}, {kept}"


def layer_table(ranking: Ranking) -> str:
    """Align a line per layer, the first to stay first."""
    rows = {row["layer"]: row for row in layer_rows(ranking)}
    recall = "recall" in ranking.layer_values
    titles = ["layer", "perplexity", "nats lost", "KL", *(["recall", "lost"] if recall else [])]
    if ranking.sense == "restore":
        titles = [title.replace("lost", "gained") for title in titles]
    places = [rank for rank in ranking.scores if rank != "kl"]
    titles += [rank.replace("recall_over_perplexity", "R/P") for rank in places]
    lines = []
    for number in ranking.order:
        row = rows[number]
        cells = [
            str(number),
            f"{row['perplexity']:.5g}",
            f"{row['worth_perplexity']:.4f}",
            f"{row['kl']:.4f}",
        ]
        if recall:
            cells += [f"{row['recall']:.3f}", f"{row['worth_recall']:.3f}"]
        for rank in places:
            score = f" ({row[f'score_{rank}']:.3g})" if rank == "recall_over_perplexity" else ""
            cells.append(f"{row[f'place_{rank}']}.{score}")
        lines.append(cells)
    return text_table(titles, lines, left=0)


def tradeoff_table(ranking: Ranking, points: Sequence[Point], contexts: Sequence[int]) -> str:
    """Align a line per number of softmax layers: state by context, the layers, each curve's perplexity."""
    labels = list(dict.fromkeys(label(point["curve"], point["kept"]) for point in points))
    by_count = {(label(p["curve"], p["kept"]), p["count"]): ranking.rows[p["key"]] for p in points}
    recall = "recall" in ranking.layer_values
    sizes = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in contexts]
    titles = ["softmax", *(f"at {tokens}" for tokens in sizes), "layers"]
    for name in labels:
        titles += [f"by {name.replace('recall_over_perplexity', 'R/P')}", *(["recall"] if recall else [])]
    lines = []
    for count in sorted({point["count"] for point in points}):
        first = by_count[labels[0], count]
        states = [ranking.state_bytes(first.own, n) for n in contexts]
        cells = [str(count), *("?" if state is None else size(state) for state in states)]
        cells.append(",".join(map(str, first.own)) or "-")
        for name in labels:
            row = by_count[name, count]
            cells.append(f"{row.perplexity:.5g}")
            if recall:
                cells.append("-" if row.accuracy is None else f"{row.accuracy:.3f}")
        lines.append(cells)
    return text_table(titles, lines, left=0)


def content(ranking: Ranking, points: Sequence[Point]) -> dict[str, Any]:
    """Collect what results.json says beside its rows."""
    return {
        "rank": ranking.rank,
        "sense": ranking.sense,
        "order": ranking.order,
        "note": ranking.note,
        "worth": ranking.layer_values,
        "scores": ranking.scores,
        "tradeoff": [{**point, "key": [list(point["key"][0]), point["key"][1]]} for point in points],
    }
