"""docs/patches.md from entries and results; every figure comes from a result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .docstrings import AS_JOINED, DIRECTIONS, GROUPS, Entry
from .plan import CONTROL, OPTIONS, ORIGINAL, Settings

Results = Mapping[str, Mapping[str, Any]]
MISSING = "not measured"
COMPOSED = "Compositions"
HEAD = """\
# Patches

Every registered patch: what it computes, what it costs, when to take it, and what it does to one small model
before and after a little fine-tuning. Written by

```text
python -m tools.catalogue --model {model} --data {data} --work-dir W --output docs/patches.md
```

from the docstrings of the patches and from measurements; the same command goes on where it was stopped, and
measures again what has changed. `python -m tools.catalogue --help` has more.

## How to read the figures

- The model is `{model_name}` ({shape}). The texts are stories.
- Perplexity is over the first {max_tokens:,} tokens of held-out stories, in windows of {length} side by side,
  with its standard error over windows. The tokens are the same for all: differences between patches are more
  certain than that.
- *Before*: the patch on the pretrained weights as they are. *After*: {steps} steps of {batch_size} rows of
  {block_size} tokens ({trained}), peak learning rate {lr:g}, all weights, the same rows in the
  same order for all; float32, seed {seed}, one thread.
- **Original**, untouched: {original}. **Control**, fine-tuned in the same way without a patch:
  {control}. After fine-tuning, a patch is to be compared with the control.
- Time is in the number of tokens n. *State* is what one layer keeps per sequence on this model, *parameters*
  what is added per layer; both as `hf_linattn.describe` says.
- So little training of so small a model tells which patches fit pretrained weights, not which are best in the
  end; and windows of {length} tokens tell nothing about long contexts: for those there is `--compare` in
  [perplexity.md](perplexity.md).
{versions}
"""


def page(
    entries: Mapping[str, Entry],
    composed: Mapping[str, str],
    refused: Mapping[str, str],
    results: Results,
    settings: Settings,
    model: str,
    data: str,
) -> str:
    """The whole page.

    Args:
        entries: by name of the patch.
        composed: spec of a composition -> a sentence about it.
        refused: names known only to be refused -> why.
        results: of the subjects that were measured.
        settings: how they were measured.
        model: the model as the command on the page should name it.
        data: the texts, likewise.
    """
    groups = {
        title: [entry for entry in entries.values() if entry.group == group]
        for group, title in GROUPS.items()
    }
    parts = [_head(results, settings, model, data), "## Overview\n"]
    for title, members in groups.items():
        if members:
            rows = [_row(e.name, e.summary, e.time, e.directions, results) for e in members]
            parts.append(_table(f"**[{title}](#{slug(title)})**", rows))
    if composed:
        rows = [
            _row(spec, text, _time(spec, entries), _directions(spec, entries), results)
            for spec, text in composed.items()
        ]
        parts.append(_table(f"**[{COMPOSED}](#{slug(COMPOSED)})**", rows))
    for title, members in groups.items():
        if members:
            parts.append(f"## {title}\n")
            parts += [_entry(entry, results) for entry in members]
    if composed:
        parts.append(f"## {COMPOSED}\n")
        parts += [_composition(spec, text, entries, results) for spec, text in composed.items()]
    if refused:
        parts.append("## Names that are refused\n")
        parts.append("\n".join(f"- `{name}`: {why}" for name, why in refused.items()) + "\n")
    return "\n".join(parts)


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _head(results: Results, settings: Settings, model: str, data: str) -> str:
    facts = next((r["model"] for r in results.values() if "model" in r), None)
    shape = (
        "not measured yet"
        if facts is None
        else (f"{facts['class']}, {facts['parameters']:,} parameters, {len(facts['layers'])} layers")
    )
    tokens = sorted({r["tokens"] for r in results.values() if "tokens" in r})
    versions = sorted(
        {
            f"torch {r['versions']['torch']}, transformers {r['versions']['transformers']}"
            for r in results.values()
            if "versions" in r
        }
    )
    return HEAD.format(
        model=model,
        data=data,
        model_name=model.rpartition("/")[2],
        shape=shape,
        trained=", ".join(f"{n:,}" for n in tokens) + " tokens" if tokens else MISSING,
        original=_figure(results, ORIGINAL, "before"),
        control=_figure(results, CONTROL, "after"),
        versions=f"- {'; '.join(versions)}.\n" if versions else "",
        **asdict(settings),
    )


def _table(title: str, rows: Sequence[str]) -> str:
    head = "| patch | what it does | time | state | parameters | directions | before | after |"
    return "\n".join([title, "", head, "|---" * 8 + "|", *rows, ""])


def _row(name: str, summary: str, time: str, directions: str, results: Results) -> str:
    state, parameters = _cost(results.get(name))
    if directions == "bidirectional":
        before = after = state = parameters = "-"
    else:
        before, after = (_figure(results, name, when, error=False) for when in ("before", "after"))
    link = f"[`{name}`](#{slug(name)})"
    return _line(link, summary, time, state, parameters, DIRECTIONS[directions], before, after)


def _line(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _directions(spec: str, entries: Mapping[str, Entry]) -> str:
    """That of the first part that is not for both."""
    return next((d for part in spec.split("+") if (d := entries[part].directions) != "both"), "both")


def _time(spec: str, entries: Mapping[str, Entry]) -> str:
    """That of the attentions in a composition: modifiers have none of their own."""
    times = [entries[part].time for part in spec.split("+") if entries[part].time != AS_JOINED]
    return " + ".join(dict.fromkeys(times)) or AS_JOINED


def _entry(entry: Entry, results: Results) -> str:
    lines = [f"### `{entry.name}`", "", entry.summary, "", "```text", entry.formula, "```", ""]
    for paragraph in entry.prose:
        lines += [paragraph, ""]
    if entry.options:
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [_line(f"`{o.name}`", f"`{o.default}`", o.text) for o in entry.options]
        lines.append("")
    lines += [f"**Use:** {entry.use}", ""]
    lines += [*_facts(entry.name, entry.time, entry.directions, entry.why, results), ""]
    if entry.directions != "bidirectional":
        lines += [*_figures(entry.name, results), ""]
    return "\n".join([*lines, f"Source: {entry.source}", ""])


def _composition(spec: str, text: str, entries: Mapping[str, Entry], results: Results) -> str:
    parts = [f"[`{part}`](#{slug(part)})" for part in spec.split("+")]
    lines = [f"### `{spec}`", "", f"{text} Made of {' and '.join(parts)}.", ""]
    directions = _directions(spec, entries)
    whys = [entries[part].why for part in spec.split("+") if entries[part].why]
    lines += [*_facts(spec, _time(spec, entries), directions, "; ".join(whys), results), ""]
    return "\n".join([*lines, *_figures(spec, results), ""])


def _facts(name: str, time: str, directions: str, why: str, results: Results) -> list[str]:
    lines = [f"- time: {time}"]
    if directions != "bidirectional":
        state, parameters = _cost(results.get(name))
        lines += [f"- state per layer and sequence: {state}; parameters added per layer: {parameters}"]
    spoken = {"both": "causal and bidirectional"}.get(directions, DIRECTIONS[directions])
    return [*lines, f"- {spoken}{f': {why}' if why else ''}"]


def _figures(name: str, results: Results) -> list[str]:
    result = results.get(name, {})
    if "error" in result:
        return [f"No figures: measuring it failed with {result['error']}"]
    used = OPTIONS.get(name)
    told = f", with {', '.join(f'`{k}={v!r}`' for k, v in used.items())}" if used else ""
    plain = _figure(results, ORIGINAL, "before"), _figure(results, CONTROL, "after")
    return [
        _line(f"perplexity{told}", "before", "after fine-tuning"),
        "|---|---|---|",
        _line(f"`{name}`", _figure(results, name, "before"), _figure(results, name, "after")),
        _line("without a patch", *plain),
    ]


def _cost(result: Mapping[str, Any] | None) -> tuple[str, str]:
    """State and parameters per layer; layers that differ are told apart."""
    if result is None or "model" not in result:
        return MISSING, MISSING
    layers = result["model"]["layers"]
    states = list(dict.fromkeys(_state(layer) for layer in layers))
    parameters = list(dict.fromkeys(f"{layer['parameters']:,}" for layer in layers))
    return "; ".join(states), "; ".join(parameters)


def _state(layer: Mapping[str, Any]) -> str:
    parts = []
    if layer["state_bytes"] is not None:
        parts.append(f"{layer['state_bytes']:,} B constant")
    if layer["bytes_per_token"] is not None:
        limit = " up to the window" if layer["window"] else ""
        parts.append(f"{layer['bytes_per_token']:,} B per token{limit}")
    return " and ".join(parts) or "not known"


def _figure(results: Results, name: str, when: str, error: bool = True) -> str:
    result = results.get(name, {})
    if "error" in result:
        return "failed"
    if when not in result:
        return MISSING
    value, stderr = result[when]["perplexity"], result[when]["stderr"]
    digits = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    shown = f"{value:,.{digits}f}"
    return shown if stderr is None or not error else f"{shown} +- {stderr:,.{digits}f}"
