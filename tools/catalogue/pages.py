"""Write the pages of docs/patches/ from entries and results; every figure comes from a result.

README.md is the index, with how the figures were measured; each group of patches has a page of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .docstrings import AS_JOINED, DIRECTIONS, GROUPS, Entry, Group
from .plan import CONTROL, OPTIONS, ORIGINAL, Settings

Results = Mapping[str, Mapping[str, Any]]
MISSING = "not measured"
INDEX = "README.md"
COMPOSED = Group(
    "Compositions",
    "compositions.md",
    'Patches joined by "+": an attention with its modifiers, or a window with a linear attention behind it.',
)
HEAD = """\
# Patches

The table says for each patch what it computes, what it costs, and which perplexity one small model has with
it, before and after a little fine-tuning. A name leads to formula, options, use and source. To choose by
purpose, begin with the table in the [README](../../README.md#which-patch-for-which-purpose).

n is the number of tokens; state is what one layer keeps per sequence. Without a patch the model has a
perplexity of {original_value} before and {control_value} after the same fine-tuning.
"""
METHOD = """\
## How to read the figures

- The model is `{model_name}` ({shape}). The texts are stories.
- Perplexity is over the first {max_tokens:,} tokens of held-out stories, in windows of {length} side by side,
  with its standard error over windows. The tokens are the same for all: differences between patches are more
  certain than that.
- *Before*: the patch on the pretrained weights, not trained. *After*: {steps} steps of {batch_size} rows of
  {block_size} tokens ({trained}), peak learning rate {lr:g}, all weights, the same rows in the
  same order for all; float32, seed {seed}, one thread.
- **Original**, untouched: {original}. **Control**, fine-tuned in the same way without a patch:
  {control}. After fine-tuning, compare a patch with the control.
- Time is in the number of tokens n. *State* is what one layer keeps per sequence on this model, *parameters*
  what is added per layer; both as `hf_linattn.describe` says.
- So little training of so small a model shows which patches fit pretrained weights, not which are best in the
  end. Windows of {length} tokens show nothing about long contexts: for those there is `--compare` in
  [perplexity.md](../perplexity.md).
{versions}
## How these pages are made

```text
python -m tools.catalogue --model {model} --data {data} --work-dir W --output docs/patches
```

writes them from the docstrings of the patches and from measurements. The same command continues a run that
was stopped, and measures again what has changed. `python -m tools.catalogue --help` has more.
"""


@dataclass(frozen=True)
class _Line:
    """One patch or composition in a table."""

    name: str
    group: Group
    summary: str
    time: str
    directions: str


def pages(
    entries: Mapping[str, Entry],
    composed: Mapping[str, str],
    refused: Mapping[str, str],
    results: Results,
    settings: Settings,
    model: str,
    data: str,
) -> dict[str, str]:
    """Write all pages.

    Args:
        entries: by name of the patch.
        composed: spec of a composition -> a sentence about it.
        refused: names known only to be refused -> why.
        results: of the subjects that were measured.
        settings: how they were measured.
        model: the model as the command in the index should name it.
        data: the texts, likewise.

    Returns:
        File name -> text, the index first.
    """
    lines = [_Line(e.name, GROUPS[e.group], e.summary, e.time, e.directions) for e in entries.values()]
    lines += [
        _Line(spec, COMPOSED, text, _time(spec, entries), _directions(spec, entries))
        for spec, text in composed.items()
    ]
    groups = {
        group: members
        for group in (*GROUPS.values(), COMPOSED)
        if (members := [line for line in lines if line.group == group])
    }
    written = {INDEX: _index(groups, refused, results, settings, model, data)}
    for group, members in groups.items():
        parts = [f"# {group.title}\n", f"{group.summary}\n", _note(results), _table(members, results)]
        for line in members:
            if group == COMPOSED:
                parts.append(_composition(line, entries, results))
            else:
                parts.append(_entry(entries[line.name], results))
        written[group.page] = "\n".join(parts)
    return written


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _index(
    groups: Mapping[Group, Sequence[_Line]],
    refused: Mapping[str, str],
    results: Results,
    settings: Settings,
    model: str,
    data: str,
) -> str:
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
    head = HEAD.format(
        original_value=_figure(results, ORIGINAL, "before", error=False),
        control_value=_figure(results, CONTROL, "after", error=False),
    )
    method = METHOD.format(
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
    rows = ["| patch | group | what it does | time | state | before | after |", "|---" * 7 + "|"]
    for group, members in groups.items():
        for line in members:
            state, _, before, after = _numbers(line, results)
            name = f"[`{line.name}`]({group.page}#{slug(line.name)})"
            title = f"[{group.title}]({group.page})"
            rows.append(_row(name, title, line.summary, line.time, state, before, after))
    parts = [head, "\n".join(rows) + "\n", method]
    if refused:
        parts.append("## Names that are refused\n")
        parts.append("\n".join(f"- `{name}`: {why}" for name, why in refused.items()) + "\n")
    return "\n".join(parts)


def _note(results: Results) -> str:
    original, control = (
        _figure(results, name, when, error=False) for name, when in ((ORIGINAL, "before"), (CONTROL, "after"))
    )
    return (
        "*Before* and *after* are perplexities of one small model, before and after a little fine-tuning.\n"
        f"Without a patch it has {original} and {control}; [how they were measured]"
        f"({INDEX}#how-to-read-the-figures).\n"
    )


def _table(members: Sequence[_Line], results: Results) -> str:
    head = "| patch | what it does | time | state | parameters | directions | before | after |"
    rows = [head, "|---" * 8 + "|"]
    for line in members:
        link = f"[`{line.name}`](#{slug(line.name)})"
        state, parameters, before, after = _numbers(line, results)
        directions = DIRECTIONS[line.directions]
        rows.append(_row(link, line.summary, line.time, state, parameters, directions, before, after))
    return "\n".join(rows) + "\n"


def _numbers(line: _Line, results: Results) -> tuple[str, str, str, str]:
    """State, parameters, perplexity before and after; dashes for what a causal model cannot have."""
    if line.directions == "bidirectional":
        return "-", "-", "-", "-"
    state, parameters = _cost(results.get(line.name))
    before, after = (_figure(results, line.name, when, error=False) for when in ("before", "after"))
    return state, parameters, before, after


def _row(*cells: str) -> str:
    """Join cells to a row of a table."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _directions(spec: str, entries: Mapping[str, Entry]) -> str:
    """Return those of the first part that is not for both."""
    return next((d for part in spec.split("+") if (d := entries[part].directions) != "both"), "both")


def _time(spec: str, entries: Mapping[str, Entry]) -> str:
    """Return the time of the attentions in a composition: modifiers have none of their own."""
    times = [entries[part].time for part in spec.split("+") if entries[part].time != AS_JOINED]
    return " + ".join(dict.fromkeys(times)) or AS_JOINED


def _entry(entry: Entry, results: Results) -> str:
    lines = [f"## `{entry.name}`", "", entry.summary, "", "```text", entry.formula, "```", ""]
    for paragraph in entry.prose:
        lines += [paragraph, ""]
    if entry.options:
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [_row(f"`{o.name}`", f"`{o.default}`", o.text) for o in entry.options]
        lines.append("")
    lines += [f"**Use:** {entry.use}", ""]
    lines += [*_facts(entry.name, entry.time, entry.directions, entry.why, results), ""]
    if entry.directions != "bidirectional":
        lines += [*_figures(entry.name, results), ""]
    return "\n".join([*lines, f"Source: {entry.source}", ""])


def _composition(line: _Line, entries: Mapping[str, Entry], results: Results) -> str:
    names = line.name.split("+")
    parts = [f"[`{name}`]({GROUPS[entries[name].group].page}#{slug(name)})" for name in names]
    lines = [f"## `{line.name}`", "", f"{line.summary} Made of {' and '.join(parts)}.", ""]
    whys = [entries[name].why for name in names if entries[name].why]
    lines += [*_facts(line.name, line.time, line.directions, "; ".join(whys), results), ""]
    return "\n".join([*lines, *_figures(line.name, results), ""])


def _facts(name: str, time: str, directions: str, why: str, results: Results) -> list[str]:
    lines = [f"- time: {time}"]
    if directions != "bidirectional":
        state, parameters = _cost(results.get(name))
        lines += [f"- state per layer and sequence: {state}; parameters added per layer: {parameters}"]
    text = {"both": "causal and bidirectional"}.get(directions, DIRECTIONS[directions])
    return [*lines, f"- {text}{f': {why}' if why else ''}"]


def _figures(name: str, results: Results) -> list[str]:
    result = results.get(name, {})
    if "error" in result:
        return [f"No figures: measuring it failed with {result['error']}"]
    options = ", ".join(f"`{key}={value!r}`" for key, value in OPTIONS.get(name, {}).items())
    plain = _figure(results, ORIGINAL, "before"), _figure(results, CONTROL, "after")
    return [
        _row(f"perplexity, with {options}" if options else "perplexity", "before", "after fine-tuning"),
        "|---|---|---|",
        _row(f"`{name}`", _figure(results, name, "before"), _figure(results, name, "after")),
        _row("without a patch", *plain),
    ]


def _cost(result: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return state and parameters per layer; a semicolon stands between layers that differ."""
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
