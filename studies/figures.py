"""The figures of the study: what the page shows of the results in the work folder, with six digits.

A measurement goes by the name of its folder in the work folder, `books/perplexity/control-0`. The figures lie
beside the page, so that it can be made, and the study go on, where the work folder is gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from hf_linattn.cli.files import replacing
from hf_linattn.errors import DataError

Json = dict[str, Any]


def load(path: Path) -> dict[str, Json]:
    """Read figures; none where there is no file yet.

    Raises:
        DataError: the file is something else.
    """
    if not path.exists():
        return {}
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(figure, dict) for figure in figures.values()):
            raise ValueError("its entries are not objects")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} does not hold the figures of the study: {error}") from error
    return dict(figures)


def write(path: Path, figures: dict[str, Json]) -> None:
    """Write the figures, one measurement a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(figures[key])}" for key in sorted(figures)]
    with replacing(path) as partial:
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def collect(figures: dict[str, Json], work: Path) -> dict[str, Json]:
    """Add what lies complete in a work folder, and return the figures."""
    for key in _keys(work):
        if (content := _complete(work, key)) is not None:
            figures[key] = rounded(KINDS[_kind(key)][1](content))
    return figures


def measured(work: Path, key: str) -> bool:
    """Return whether a measurement lies complete in the work folder."""
    return _complete(work, key) is not None


def _complete(work: Path, key: str) -> Json | None:
    """Read what a command left; None before its end."""
    try:
        content: Json = json.loads((work / key / KINDS[_kind(key)][0]).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not begun
        return None
    return content if content.get("complete", True) else None


def _kind(key: str) -> str:
    return key.split("/")[1] if "/" in key else key


def _keys(work: Path) -> Iterator[str]:
    """Yield the measurements in a work folder, complete or not."""
    for kind in KINDS:
        where = {"scale": "scale", "layers": "*/layers"}.get(kind, f"*/{kind}/*")
        for folder in sorted(work.glob(where)):
            yield folder.relative_to(work).as_posix()


def rounded(value: Any) -> Any:
    """Round all numbers in it to six digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _perplexity(content: Json) -> Json:
    """By length, and by position at the greatest."""
    rows = sorted(content["rows"], key=lambda row: row["length"])
    buckets = [[b["start"], b["end"], b["perplexity"]] for b in rows[-1]["buckets"]]
    return {"lengths": {str(row["length"]): row["perplexity"] for row in rows}, "positions": buckets}


def _recall(content: Json) -> Json:
    """Of the original and the row: by task and length the accuracy, mean over depths; and that of chance."""
    labels = {"original": content["models"][0]["label"], "row": content["models"][-1]["label"]}
    accuracy = {
        name: _by_task([row for row in content["rows"] if row["model"] == label], "accuracy")
        for name, label in labels.items()
    }
    return {**accuracy, "chance": _by_task(content["rows"], "chance")}


def _by_task(rows: list[Json], name: str) -> dict[str, dict[str, float]]:
    means: dict[str, dict[str, float]] = {}
    for task, length in sorted({(row["task"], row["length"]) for row in rows}):
        values = [row[name] for row in rows if (row["task"], row["length"]) == (task, length)]
        means.setdefault(task, {})[str(length)] = mean(values)
    return means


def _generation(content: Json) -> Json:
    """Of the row; and how often the original repeats itself."""
    original, *_, last = content["summaries"]
    names = ("agreement", "kl", "top1", "repetition")
    return {**{name: last[name] for name in names}, "original_repetition": original["repetition"]}


def _branches(content: Json) -> Json:
    """The perplexity of each branch."""
    return {row["model"]: row["perplexity"] for row in content["rows"]}


def _diagnose(content: Json) -> Json:
    """Activations over layers, attention over heads, entropy by visible keys."""
    layers, heads = content["layers"], content["heads"]
    curve: dict[int, list[float]] = {}
    for head in heads:
        for point in head["curve"]:
            curve.setdefault(point["up_to"], []).append(point["entropy"])
    return {
        "kurtosis_max": max(layer["kurtosis"] for layer in layers),
        "kurtosis_mean": mean(layer["kurtosis"] for layer in layers),
        "inf_norm_max": max(layer["inf_norm"] for layer in layers),
        **{name: mean(head[name] for head in heads) for name in ("sink", "mass", "relative_entropy")},
        "entropy": {str(n): mean(values) for n, values in sorted(curve.items())},
    }


def _layers(content: Json) -> Json:
    """The layers, and which of them each method keeps."""
    points = [point for point in content["tradeoff"] if point["kept"] == "softmax"]
    kept = [[point["curve"], point["key"][0]] for point in points]
    return {"numbers": [layer["number"] for layer in content["layers"]], "kept": kept}


def _scale(content: Json) -> Json:
    return {"rows": content["rows"]}


KINDS: dict[str, tuple[str, Callable[[Json], Json]]] = {
    "perplexity": ("results.json", _perplexity),
    "recall": ("results.json", _recall),
    "generation": ("results.json", _generation),
    "branches": ("results.json", _branches),
    "diagnose": ("diagnose.json", _diagnose),
    "layers": ("results.json", _layers),
    "scale": ("results.json", _scale),
}
"""By kind of measurement: the file that holds it, and what of it is kept."""
