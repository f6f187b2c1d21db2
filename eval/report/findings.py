"""The report's sentences, each computed from the numbers it speaks of."""

from __future__ import annotations

from ..common.formatting import change, exponential, number, percent, size, times
from .summary import Run, Summary

BROKEN, WORSE, BETTER = 1.5, 1.05, 0.97
"""Perplexity over that of the shortest length: from where on a curve counts as broken, worse, better."""


def findings(summary: Summary) -> list[str]:
    """What was found, one sentence or two per run."""
    sentences = [_original(summary), _control(summary)]
    sentences += [_patch(summary, run) for run in summary.patched]
    sentences.append(_best(summary))
    return [sentence for sentence in sentences if sentence]


def _shape(run: Run) -> str:
    """How a curve goes from the shortest length to the longest."""
    values = run.perplexities
    first, last = min(values), max(values)
    ratio = values[last] / values[first]
    ends = f"{number(values[first])} at {first:,} tokens, {number(values[last])} at {last:,}"
    if ratio >= BROKEN:
        kind = f"{times(ratio)} as much"
    elif ratio >= WORSE:
        kind = f"{percent(ratio)} more"
    elif ratio <= BETTER:
        kind = f"{percent(ratio)} less: more context helps"
    else:
        kind = "nearly the same: more context neither helps nor hurts"
    return f"{ends}, {kind}"


def _original(summary: Summary) -> str:
    run = summary.original
    if run is None or len(run.points) < 2:
        return ""
    text = f"<b>The model as it came</b> has perplexity {_shape(run)}."
    values, trained = run.perplexities, summary.train_length
    beyond = [length for length in sorted(values) if trained and length > trained]
    inside = [length for length in sorted(values) if trained and length <= trained]
    if beyond and inside and values[beyond[0]] >= BROKEN * values[inside[-1]]:
        text += (
            f" It breaks as soon as the context is longer than the {trained:,} tokens it was trained on: at "
            f"{beyond[0]:,} it has {times(values[beyond[0]] / values[inside[-1]])} the perplexity of "
            f"{inside[-1]:,}, "
            "on the very same tokens. Distances between tokens that never occurred in training are the "
            "usual cause."
        )
    elif beyond and run.flatness is not None and run.flatness < WORSE:
        text += f" It does not break beyond the {trained:,} tokens it was trained on."
    return text


def _control(summary: Summary) -> str:
    run, original = summary.control, summary.original
    if run is None or not run.points:
        return ""
    batches = " on the same batches" if summary.alike else ""
    text = f"<b>The control</b>, the same model fine-tuned with its own attention{batches},"
    if len(run.points) > 1:
        text += f" has perplexity {_shape(run)}."
    else:
        text += f" has perplexity {number(run.points[0].perplexity)}."
    if original is not None and original.points:
        length = min(run.perplexities)
        if length in original.perplexities:
            ratio = run.perplexities[length] / original.perplexities[length]
            text += f" Against the model as it came that is {change(ratio)} at {length:,} tokens"
            text += ": what the fine-tuning alone does to the model on this text."
    return text


def _patch(summary: Summary, run: Run) -> str:
    if not run.points:
        return ""
    text = f"<b>{run.name}</b>: perplexity "
    text += _shape(run) if len(run.points) > 1 else number(run.points[0].perplexity)
    text += "."
    length = min(run.perplexities)
    ratio = summary.ratio(run, length)
    if ratio is not None:
        text += f" Its price at {length:,} tokens: {change(ratio)} against the control."
    wins = [n for n in sorted(run.perplexities) if (summary.ratio(run, n) or 1.0) < BETTER]
    losses = [n for n in sorted(run.perplexities) if (summary.ratio(run, n) or 1.0) > WORSE]
    if ratio is not None and wins:
        text += f" It is better than the control at {_lengths(wins)} tokens"
        text += f" and worse at {_lengths(losses)}." if losses else "."
    elif ratio is not None and not losses:
        text += " At no length does it differ from the control by more than a few per cent."
    elif ratio is not None:
        text += f" It is worse than the control at {_lengths(losses)} tokens and better nowhere."
    tuning = run.tuning or {}
    before, after = tuning.get("eval_loss_before"), tuning.get("eval_loss")
    if before is not None and after is not None:
        text += (
            f" Fine-tuning took the validation perplexity from {number(exponential(before))}, with the "
            "attention "
            f"just swapped, to {number(exponential(after))}."
        )
    if run.state.get("state_bytes") and not run.state.get("bytes_per_token"):
        text += f" A sequence of any length is held in {size(run.state['state_bytes'])}."
    return text


def _best(summary: Summary) -> str:
    if len(summary.lengths) < 2:
        return ""
    found = []
    for length in (summary.lengths[0], summary.lengths[-1]):
        runs = [run for run in summary.runs if length in run.perplexities]
        best = min(runs, key=lambda run: run.perplexities[length])
        others = sorted(run.perplexities[length] for run in runs)
        lead = ""
        if len(others) > 1:
            ratio = others[1] / others[0]
            lead = f"; the next has {change(ratio)}" if ratio >= 1.005 else ", hardly ahead of the next"
        found.append(f"at {length:,} tokens {best.label} ({number(best.perplexities[length])}{lead})")
    return f"<b>Lowest perplexity</b>: {'; '.join(found)}."


def cautions(summary: Summary) -> list[str]:
    """What the numbers do not say."""
    lengths, measuring = summary.lengths, summary.measuring
    items = []
    stride = measuring.get("stride")
    if lengths and stride not in (None, "full"):
        items.append(
            f"<b>The same tokens at every length.</b> The last {stride:,} tokens of each window are "
            "scored; only how "
            "much text stands before them changes. So a curve that rises says that more context does "
            "harm, and one "
            "that falls that it is used."
        )
    items.append(
        "<b>Flat is not recall.</b> A model that forgets what it read long ago can have a perfectly flat "
        "curve: "
        "most tokens are guessed from the few before them. Whether it can find a name or a number again "
        "from far "
        "back is another measurement."
    )
    tokens = sorted({run.tuning["tokens"] for run in summary.runs if run.tuning})
    if len(tokens) == 1:
        items.append(
            f"<b>Equal tokens, not equal care.</b> Every fine-tuned run saw the same {tokens[0]:,} tokens "
            "in the "
            "same batches with the same learning rate. That is fair to the control and hard on patches "
            "that change "
            "the model most: more training would lower their curves further."
        )
    elif tokens:
        items.append("<b>The runs saw different amounts of text</b>, so they cannot be compared as equals.")
    parameters = next(
        (r.tuning["parameters"] for r in summary.runs if r.tuning and "parameters" in r.tuning), None
    )
    size_text = f"One model of {parameters / 1e6:,.1f} M parameters" if parameters else "One model"
    items.append(
        f"<b>{size_text}, one seed, one kind of text.</b> Differences of a few per cent may be chance, "
        "and a large "
        "model need not behave like a small one."
    )
    rows = [point for run in summary.runs for point in run.points if point.stderr is not None]
    if rows:
        items.append(
            "<b>Error bars</b> are standard errors over documents (over windows if there is one "
            "document). Documents "
            "differ more than models do, and all runs read the same ones, so runs may differ reliably "
            "although "
            "their bars overlap."
        )
    if summary.data.get("documents"):
        items.append(
            f"<b>Held out</b> means: none of the {summary.data['documents']} document(s) measured on was "
            "fine-tuned "
            "on. Whether a model of your own met them in its pretraining, only its makers know; the model "
            "that comes "
            "with the demo has not."
        )
    return items


def _lengths(lengths: list[int]) -> str:
    if len(lengths) == 1:
        return f"{lengths[0]:,}"
    return ", ".join(f"{n:,}" for n in lengths[:-1]) + f" and {lengths[-1]:,}"
