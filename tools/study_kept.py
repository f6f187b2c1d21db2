"""Which layers stay softmax: the plans that `hf_linattn.eval.layers` makes, as rows of the study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from study_place import Place
from study_row import ALL_WEIGHTS, HYBRID_BOTH_AT_ONCE, NEAR_AND_FAR, TUNED, WINDOW_AND_FAR, Row

COUNTS = (1, 2)
"""Softmax layers kept."""
MAP = "hedgehog"
TRANSFERRED = Row(MAP, "convert", MAP, main=True)
"""The row whose stage `transfer` is ranked; the one with no softmax layer kept too."""


@dataclass(frozen=True)
class Better:
    """What stands beside the kept layers.

    Attributes:
        patch, options: of the other layers.
        kept: of the kept ones; None leaves them as they are.
        extra: more words for the training command.
        also: more words for the page.
    """

    patch: str
    options: dict[str, Any]
    kept: str | None = None
    extra: tuple[str, ...] = ALL_WEIGHTS
    also: str = ""


BETTER = {
    "tuned": Better("window+gated", WINDOW_AND_FAR, extra=TUNED, also=", fine-tuned in the last 0.4 M"),
    "gated": Better("gated", {"feature_map": "taylor2", **NEAR_AND_FAR}),
    "window": Better("window+gated", WINDOW_AND_FAR),
    "nope": Better("window+gated", WINDOW_AND_FAR, "nope", also=", no RoPE in the kept layer"),
    "nope-logn": Better(
        "window+gated", WINDOW_AND_FAR, "nope+logn", also=", no RoPE but log-n in the kept layer"
    ),
    "nope-both": Better(
        "window+gated",
        WINDOW_AND_FAR,
        "nope",
        extra=HYBRID_BOTH_AT_ONCE,
        also=", no RoPE in the kept layer, divergence and text at once in steps of 2 rows",
    ),
    "nope-logn-both": Better(
        "window+gated",
        WINDOW_AND_FAR,
        "nope+logn",
        extra=HYBRID_BOTH_AT_ONCE,
        also=", no RoPE but log-n in the kept layer, divergence and text at once in steps of 2 rows",
    ),
}
"""The best of table 1 in the other layers,"""
CHOSEN_BY = {"kl", "recall_over_perplexity"}
"""with the layers that these methods keep."""


def layers_words(place: Place) -> list[str]:
    """The command that ranks the layers of the transferred model by every rank."""
    transferred = place.trained(TRANSFERRED, 0) / "transfer"
    words = ["python", "-m", "hf_linattn.eval.layers", "--model", str(transferred)]
    words += ["--original", str(place.model), "--data", str(place.text("held_out")), "--bos", "no"]
    words += ["--curves", "all", "--counts", ",".join(map(str, (0, *COUNTS))), "--keep", str(COUNTS[-1])]
    words += ["--samples", "4", "--dtype", "float32"]
    return [*words, "--output-dir", str(place.work / place.layers)]


def kept_rows(place: Place) -> dict[str, Row]:
    """Rows by name, one per set of layers that some method keeps; empty until the layers are ranked."""
    if place.layers not in place.figures:
        return {}
    ranked = place.figures[place.layers]
    chosen: dict[tuple[int, ...], list[str]] = {}
    for method, own in ranked["kept"]:
        if len(own) in COUNTS:
            chosen.setdefault(tuple(own), []).append(method)
    rows = {}
    for own, methods in sorted(chosen.items(), key=lambda item: (len(item[0]), item[0])):
        name = "kept-" + "-".join(map(str, own))
        linear = ",".join(str(number) for number in ranked["numbers"] if number not in own)
        told = f"softmax in {', '.join(map(str, own))}"
        by = f"{told}: {', '.join(sorted(set(methods)))}"
        rows[name] = Row(name, "convert", {linear: MAP}, extra=ALL_WEIGHTS, told=by)
        for short, better in BETTER.items() if CHOSEN_BY & set(methods) else ():
            if better.kept and len(own) > 1:
                continue
            other = f"{name}-{short}"
            plan: dict[str, Any] = {linear: [better.patch, better.options]}
            if better.kept:
                plan[",".join(map(str, own))] = better.kept
            named = f"{told}, `{better.patch}` ({better.options['feature_map']}) elsewhere{better.also}"
            rows[other] = Row(other, "convert", plan, extra=better.extra, told=named)
    return rows
