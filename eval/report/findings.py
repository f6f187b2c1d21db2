"""Write the report's sentences, each computed from the numbers it speaks of."""

from __future__ import annotations

from ..common.formatting import change, exponential, number, percent, size, times
from .rows import Comparison, Curves, ModelRow

BROKEN, WORSE, BETTER = 1.5, 1.05, 0.97
"""Perplexity over that of the shortest length: from where on a curve counts as broken, worse, better."""


def findings(comparison: Comparison, curves: Curves) -> list[str]:
    """Return what the length curves of one group show, one sentence or two per row."""
    sentences = []
    for row in curves.rows:
        if row.role == "original":
            sentences.append(_original(row, curves))
        elif row.role == "control":
            sentences.append(_control(comparison, row))
        else:
            sentences.append(_patch(comparison, row))
    return [sentence for sentence in (*sentences, _best(curves)) if sentence]


def _shape(row: ModelRow) -> str:
    """Say how a curve goes from the shortest length to the longest."""
    values, ratio = row.perplexities, row.longest_over_shortest
    first, last = min(values), max(values)
    if ratio is None:
        return number(values[first])
    if ratio >= BROKEN:
        kind = f"{times(ratio)} as much"
    elif ratio >= WORSE:
        kind = f"{percent(ratio)} more"
    elif ratio <= BETTER:
        kind = f"{percent(ratio)} less: more context helps"
    else:
        kind = "nearly the same: more context neither helps nor hurts"
    return f"{number(values[first])} at {first:,} tokens, {number(values[last])} at {last:,}, {kind}"


def _original(row: ModelRow, curves: Curves) -> str:
    if len(row.points) < 2:
        return ""
    text = f"<b>{row.name}</b>, the pretrained model, has perplexity {_shape(row)}."
    values, trained = row.perplexities, curves.train_length
    beyond = [length for length in sorted(values) if trained and length > trained]
    inside = [length for length in sorted(values) if trained and length <= trained]
    if beyond and inside and values[beyond[0]] >= BROKEN * values[inside[-1]]:
        text += (
            f" It breaks as soon as the context is longer than the {trained:,} tokens it was trained on: at "
            f"{beyond[0]:,} it has {times(values[beyond[0]] / values[inside[-1]])} the perplexity of "
            f"{inside[-1]:,}. Distances between tokens that never occurred in training are the usual cause."
        )
    elif beyond and (row.longest_over_shortest or WORSE) < WORSE:
        text += f" It does not break beyond the {trained:,} tokens it was trained on."
    return text


def _control(comparison: Comparison, row: ModelRow) -> str:
    batches = " on the same batches" if comparison.alike else ""
    text = f"<b>{row.name}</b>, the same model fine-tuned with its own attention{batches}, "
    text += f"has perplexity {_shape(row)}."
    length = min(row.perplexities)
    if (ratio := comparison.ratio(row, "original", length)) is not None:
        text += f" Against the pretrained model that is {change(ratio)} at {length:,} tokens"
        text += ": what the fine-tuning alone does to the model on this text."
    return text


def _patch(comparison: Comparison, row: ModelRow) -> str:
    text = f"<b>{row.name}</b>: perplexity {_shape(row)}."
    length = min(row.perplexities)
    ratios = {n: comparison.ratio(row, "control", n) for n in sorted(row.perplexities)}
    better = [n for n, ratio in ratios.items() if ratio is not None and ratio < BETTER]
    worse = [n for n, ratio in ratios.items() if ratio is not None and ratio > WORSE]
    if (shortest := ratios[length]) is not None:
        text += f" Its price at {length:,} tokens: {change(shortest)} against the control."
        if better:
            text += f" It is better than the control at {_lengths(better)} tokens"
            text += f" and worse at {_lengths(worse)}." if worse else "."
        elif worse:
            text += f" It is worse than the control at {_lengths(worse)} tokens and better nowhere."
        else:
            text += " At no length does it differ from the control by more than a few per cent."
    if row.validation_change is not None:
        before, after = map(exponential, row.validation_change)
        text += (
            f" Training took the validation perplexity from {number(before)}, with the attention just "
            f"swapped, to {number(after)}."
        )
    if row.state.get("state_bytes") and not row.state.get("bytes_per_token"):
        text += f" A sequence of any length is held in {size(row.state['state_bytes'])}."
    return text


def _best(curves: Curves) -> str:
    if len(curves.lengths) < 2:
        return ""
    parts = []
    for length in (curves.lengths[0], curves.lengths[-1]):
        rows = [row for row in curves.rows if length in row.perplexities]
        best = min(rows, key=lambda row: row.perplexities[length])
        others = sorted(row.perplexities[length] for row in rows)
        lead = ""
        if len(others) > 1:
            ratio = others[1] / others[0]
            lead = f"; the next has {change(ratio)}" if ratio >= 1.005 else ", hardly ahead of the next"
        parts.append(f"at {length:,} tokens {best.name} ({number(best.perplexities[length])}{lead})")
    return f"<b>Lowest perplexity</b>: {'; '.join(parts)}."


def cautions(comparison: Comparison) -> list[str]:
    """Return what the numbers do not say."""
    items = []
    strides = {curves.arguments.get("stride") for curves in comparison.curves}
    if len(strides) == 1 and (stride := strides.pop()) not in (None, "full"):
        items.append(
            f"<b>The same tokens at every length.</b> The last {stride:,} tokens of each window are scored; "
            "only how much text stands before them changes. So a curve that rises says that more context "
            "does harm, and one that falls that it is used."
        )
    if comparison.curves:
        items.append(
            "<b>Flat is not recall.</b> A model that forgets what it read long ago can have a perfectly flat "
            "curve: most tokens are guessed from the few before them. Whether it can find a name or a number "
            "again from far back is another measurement."
        )
    trained = [row for row in comparison.rows if row.stages]
    tuned = [row for row in trained if "convert" not in row.results]
    if len(tuned) > 1 and all(row.training == tuned[0].training for row in tuned):
        items.append(
            f"<b>Equal tokens, not equal care.</b> Every fine-tuned run saw the same {tuned[0].tokens:,} "
            "tokens in the same batches with the same learning rate. That is fair to the control and hard on "
            "patches that change the model most: more training would lower their curves further."
        )
    elif len({row.tokens for row in trained}) > 1:
        items.append("<b>The runs saw different amounts of text</b>, so they cannot be compared as equals.")
    counts = {row.stages[-1].results.get("parameters") for row in trained}
    parameters = counts.pop() if len(counts) == 1 else None
    size_text = f"Models of {parameters / 1e6:,.1f} M parameters, one seed" if parameters else "One seed"
    items.append(
        f"<b>{size_text} a row.</b> Differences of a few per cent may be chance, and a large model need not "
        "behave like a small one."
    )
    if any(point.stderr is not None for row in comparison.rows for point in row.points):
        items.append(
            "<b>Error bars</b> are standard errors over documents (over windows if there is one document), "
            "of one model on one text. Documents differ more than models do, and all models read the same "
            "ones, so models may differ reliably although their bars overlap."
        )
    items.append(
        "<b>Whether the text that was measured on was trained on</b> is not known here: see the commands. "
        "What a model met in its pretraining, only its makers know."
    )
    return items


def _lengths(lengths: list[int]) -> str:
    if len(lengths) == 1:
        return f"{lengths[0]:,}"
    return ", ".join(f"{n:,}" for n in lengths[:-1]) + f" and {lengths[-1]:,}"
