"""What a comparison of generation leaves behind: a table, a csv, a page to read and a plot."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hf_linattn.cli.files import replacing

from ..common.formatting import text_table
from ..common.models import name_of
from ..common.plotting import log2_axis, look
from ..common.results import save_csv
from .comparison import ORIGINAL, Comparison, Continuation, Summary, agreement

FORMAT = "hf_linattn.generation/1"
PICTURE = "kl.png"
COLUMNS = ("model", "prompt", "prompt_tokens", "tokens", "agreement", "repetition", "kl", "top1", "text")
PROMPT_END = 400
"""Letters of a prompt's end that the page shows."""
MARK = "▸"
"""Stands where a continuation leaves the original's."""

Decode = Callable[[Sequence[int]], str]


def summary(note: str, comparison: Comparison, args: argparse.Namespace) -> str:
    """Give the table, where the original comes from, and what one needs to read it."""
    titles = ["model", "agreement", "identical", "repetition", "KL, nats", "stderr", "top-1"]
    prompts = len(comparison.prompts)
    return f"""{text_table(titles, [[one.model, *_cells(one)] for one in comparison.summaries()])}
original: {note}
agreement: tokens before the first difference, of {args.new_tokens}; repetition: share of 4-grams seen \
before in the continuation
KL(original || model), top-1: along the original's continuation; stderr over prompts
{prompts} prompts; results.json, generation.csv, generation.md and kl.png in {args.output_dir}"""


def _cells(one: Summary) -> list[str]:
    same = None if one.identical is None else f"{one.identical}/{one.prompts}"
    values = (_format(one.repetition, ".3f"), _format(one.kl, ".4g"), _format(one.kl_stderr, ".2g"))
    return [_format(one.agreement, ".1f"), same or "-", *values, _format(one.top1, ".1%")]


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write(args: argparse.Namespace, comparison: Comparison, decode: Decode) -> None:
    """Write the csv, the page and the plot, each whole or not at all; `decode` turns token ids into text."""
    folder = args.output_dir
    rows = [_row(comparison, one, decode) for one in comparison.continuations]
    save_csv(folder / "generation.csv", rows, COLUMNS)
    with replacing(folder / "generation.md") as partial:
        partial.write_text(_page(args, comparison, decode), encoding="utf-8")
    save_plot(folder, comparison)


def _row(comparison: Comparison, one: Continuation, decode: Decode) -> dict[str, Any]:
    count = len(one.kl)
    return {
        "model": one.model,
        "prompt": one.prompt,
        "prompt_tokens": len(comparison.prompts[one.prompt]),
        "tokens": len(one.ids),
        "agreement": one.agreement,
        "repetition": one.repetition,
        "kl": math.fsum(one.kl) / count if count else None,
        "top1": sum(one.top1) / count if count else None,
        "text": decode(one.ids),
    }


def _page(args: argparse.Namespace, comparison: Comparison, decode: Decode) -> str:
    """Write in Markdown the table, KL by position, and the continuations of every prompt side by side."""
    summaries = comparison.summaries()
    lines = [f"# Generation beside {name_of(args.original or args.model[0])}", ""]
    lines += [*_summary_lines(summaries, args.new_tokens), *_bucket_lines(summaries)]
    lines += ["![KL against position](kl.png)", "", "## Continuations", ""]
    lines += [f"{MARK} marks where a continuation leaves the original's; ⏎ is a new line.", ""]
    labels = comparison.labels
    by_prompt = zip(*(comparison.of(label) for label in labels), strict=True)
    for index, (prompt, row) in enumerate(zip(comparison.prompts, by_prompt, strict=True), 1):
        text = decode(prompt)
        shown = text if len(text) <= PROMPT_END else "… " + text[-PROMPT_END:]
        lines += [f"### Prompt {index}, {len(prompt)} tokens", "", f"> {_safe(shown)}", ""]
        lines += _markdown(labels, [[_marked(one, row[0], decode) for one in row]])
    return "\n".join(lines)


def _summary_lines(summaries: Sequence[Summary], new_tokens: int) -> Iterator[str]:
    yield (
        f"Greedy, {new_tokens} tokens after each of {summaries[0].prompts} prompts. Agreement: tokens before "
        "the first that differs from the original's. Repetition: share of 4-grams seen before in the "
        "continuation. KL(original ‖ model) in nats per token and top-1 (share of positions where both would "
        "write the same token) are taken along the original's continuation."
    )
    yield ""
    titles = ["model", "agreement", "identical", "repetition", "KL", "its stderr", "top-1"]
    yield from _markdown(titles, [[_safe(one.model), *_cells(one)] for one in summaries])


def _bucket_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    yield "KL in nats by position in the continuation, the top-1 agreement behind it:"
    yield ""
    others = [one for one in summaries if one.buckets]
    ends = [(bucket.first, bucket.last) for bucket in others[0].buckets]
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in ends]
    rows = [
        [_safe(one.model), *(f"{bucket.kl:.3g}, {bucket.top1:.0%}" for bucket in one.buckets)]
        for one in others
    ]
    yield from _markdown(["model", *spans], rows)


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(map(_safe, titles)) + " |"
    yield "|" + "---|" * len(titles)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def _marked(one: Continuation, first: Continuation, decode: Decode) -> str:
    """Write a continuation into a cell, with a mark where it leaves the original's."""
    text = decode(one.ids)
    if one.agreement is None or one.ids == first.ids:
        return _safe(text)
    # of the texts, not of the tokens: the bytes of one char may belong to several tokens
    place = agreement([*map(ord, decode(first.ids))], [*map(ord, text)])
    return _safe(text[:place]) + MARK + _safe(text[place:])


def _safe(text: str) -> str:
    """Escape a text for a table of markdown."""
    kept = "".join("\\" + char if char in "\\`*_[]|#~$" else char for char in text)
    kept = kept.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "⏎ ".join(line.strip("\r") for line in kept.split("\n"))


def save_plot(folder: Path, comparison: Comparison) -> None:
    """Draw KL over the position in the continuation, a point per bucket, both logarithmic."""
    summaries = comparison.summaries()
    width = 7.6 + 0.085 * max(len(one.model) for one in summaries)
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    axes = figure.subplots()
    drawn = False
    for index, one in enumerate(summary for summary in summaries if summary.model != ORIGINAL):
        values = [bucket.kl if bucket.kl > 0 else math.nan for bucket in one.buckets]
        middles = [math.sqrt(bucket.first * bucket.last) for bucket in one.buckets]
        nowhere = all(map(math.isnan, values))
        label = f"{one.model} (0 everywhere)" if nowhere else one.model
        axes.plot(middles, values, label=label, **look(index))
        drawn = drawn or not nowhere
    log2_axis(axes)
    if drawn:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="token of the original's continuation", ylabel="KL(original || model), nats per token")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    with replacing(folder / PICTURE) as partial:
        figure.savefig(partial, format="png", dpi=150)


def continuations_of(rows: Sequence[Mapping[str, Any]]) -> list[Continuation]:
    """Read the continuations of results.json."""
    return [Continuation(**{**row, "kl": tuple(row["kl"]), "top1": tuple(row["top1"])}) for row in rows]
