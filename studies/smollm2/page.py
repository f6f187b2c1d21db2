"""Write the tables and figures of docs/smollm2.md, of findings.md and of the README.

python -m studies.smollm2.page --work-dir W --tokens 1000000
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from hf_linattn.cli.files import replacing

from .__main__ import HERE, ROWS, TOKENS, Row
from .figures import collect, load

README = HERE.parents[1] / "README.md"
DOCS = README.parent / "docs"
PAGE, FINDINGS = DOCS / "smollm2.md", HERE / "findings.md"
MARK = re.compile(r"(<!-- (\w+): written by [^\n]*-->\n).*?(<!-- end of \2 -->)", re.DOTALL)
CHOICES = ("arc_easy", "piqa", "winogrande", "openbook_qa")
LENGTHS = (512, 2048, 8192, 16384, 32768)
Json = dict[str, Any]


class Figures:
    """The figures of one row."""

    def __init__(self, figures: dict[str, Json], row: Row, tokens: int) -> None:
        self.slot, self.row, self.tokens = row.slot(tokens), row, row.share * tokens
        self.all = {
            key.split("/")[0]: value for key, value in figures.items() if key.endswith(f"/{self.slot}")
        }
        if self.all:  # what a row costs does not depend on how long it was trained
            costs = (value for key, value in figures.items() if re.fullmatch(rf"cost/{row.name}-\d+", key))
            self.all.setdefault("cost", next(costs, {}))

    def get(self, measure: str, *path: str) -> Any:
        """Look a number up; None where it was not measured."""
        value: Any = self.all.get(measure)
        for name in path:
            value = None if value is None else value.get(name)
        return value

    @property
    def tasks(self) -> Json:
        """Results of the tasks: of all items, or of the first 500."""
        return self.all.get("all_tasks") or self.all.get("tasks") or {}

    def score(self, name: str) -> str:
        """A task's accuracy in percent and its standard error."""
        found = self.tasks.get(name)
        return f"{100 * found['value']:.1f} ± {100 * found['stderr']:.1f}" if found else ""

    @property
    def four(self) -> str:
        """The mean of the four tasks with choices, in percent."""
        return f"{100 * _mean(self.tasks):.1f}" if self.tasks else ""


def number(value: float | None, digits: int = 4) -> str:
    """Write a number with so many digits; "" for none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def share(value: float | None, digits: int = 0) -> str:
    """Write a share in percent."""
    return "" if value is None else f"{100 * value:.{digits}f}"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    **{f"{n:,}": (lambda f, n=n: number(f.get("novels", str(n)))) for n in LENGTHS},  # type: ignore[misc]
    "PEPs 2,048": lambda f: number(f.get("peps", "2048")),
    "32,768 ": lambda f: number(f.get("peps", "32768")),
    "four tasks": lambda f: f.four,
    "LAMBADA": lambda f: f.score("lambada"),
    "own words": lambda f: share(f.get("agreement", "top1")),
    "pairs 1,024": lambda f: share(f.get("recall", "key_value", "1024")),
    " 2,048": lambda f: share(f.get("recall", "key_value", "2048")),
    " 8,192": lambda f: share(f.get("recall", "key_value", "8192")),
    "cache MiB": lambda f: number(_mib(f.get("cost", "cache_bytes")), 3),
    "prefill x": lambda f: number(f.get("cost", "prefill_ratio"), 3),
    "decode x": lambda f: number(f.get("cost", "decode_ratio"), 3),
}
SINKS: dict[str, Callable[[Figures], str]] = {
    "mass on the first token": lambda f: number(f.get("outliers", "sink"), 2),
    "kurtosis": lambda f: number(f.get("outliers", "kurtosis"), 3),
    "largest activation": lambda f: number(f.get("outliers", "inf_norm"), 4),
    "perplexity": lambda f: number(f.get("outliers", "perplexity")),
    "rounded to 8 bits": lambda f: number(f.get("outliers", "rounded"), 5),
}


MILLION = tuple(name for name in COLUMNS if not name.endswith((" x", "MiB")))
"""Columns of the table of rows that trained on TOKENS, or on a share of them."""
SHORT = ("512", "2,048", "8,192", "32,768", "LAMBADA", "cache MiB", "decode x")
"""Columns of the README's table."""
AGAINST = (
    "tokens",
    *("512", "2,048", "8,192"),
    "32,768 / 8,192",
    "tasks, points",
    "LAMBADA, %",
    "passkeys",
    "pairs",
    "cache, %",
)
"""Columns of the table of rows over their control."""
SHORT_ROWS = {
    "original": "the model itself",
    "control": "softmax, trained on {once} tokens",
    "h2o-measured": "`--preset h2o`, {once}",
    "h2o-recall": "`--preset recall`: softmax in 8 layers of 30, {once}",
    "hybrid-256": "`--preset hybrid`, {once}",
    "linear": "`--preset linear`, {once}",
    "h2o-swapped": "`h2o` just put in, not trained",
}
"""Its rows, and what they are called there."""
LONGEST = {"control-long": "softmax, {long}", "h2o-recall-long": "`--preset recall`, {long}"}
"""Those that stand behind them, of a share of TOKENS."""
AGAINST_ROWS = {
    "h2o-measured": "`--preset h2o`, the default",
    "h2o-long": "`--preset h2o`",
    "h2o-recall": "`--preset recall`: 8 layers of 30 stay softmax",
    "h2o-recall-eighth": "`--preset recall --keep 4`",
    "h2o-recall-long": "`--preset recall`",
    "hybrid-256": "`--preset hybrid`",
    "recall-quarter": "`--preset hybrid --keep quarter`",
    "hybrid-long": "`--preset hybrid`",
    "hybrid-text": "`--preset hybrid`, by the text alone",
    "hybrid-text-long": "`--preset hybrid`, by the text alone",
    "window-384": "`window` of 384 tokens",
    "linear": "`--preset linear`",
}
"""Rows that are told from their control, and what they are called there."""
ANSWERING = (*SHORT_ROWS, "window-384", "window-512", "h2o-recall-long", "hybrid-text-long")
"""Rows whose answers are shown."""


def _mib(value: float | None) -> float | None:
    return None if value is None else value / 2**20


def table(
    rows: Iterable[Figures],
    columns: dict[str, Callable[[Figures], str]],
    names: dict[str, str] | None = None,
) -> str:
    """Write a table of the rows that have any of its figures; with names, of those rows in that order."""
    rows = list(rows)
    named = [(row.row.name, row) for row in rows]
    if names is not None:
        named = [(name, row) for slot, name in names.items() for row in rows if row.slot == slot]
    lines = []
    for name, row in named:
        cells = [column(row) for column in columns.values()]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return _table([name.strip() for name in columns], lines)


def _table(columns: list[str], lines: list[str]) -> str:
    head = f"| | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|\n"
    return head + "\n".join(lines) + "\n" if lines else "Not measured yet.\n"


def against(rows: Iterable[Figures], controls: dict[int, Figures]) -> str:
    """Write what rows have over their control's: that of as many tokens."""
    rows, lines = list(rows), []
    for label, row in (
        (label, row) for name, label in AGAINST_ROWS.items() for row in rows if row.row.name == name
    ):
        control = controls.get(row.tokens)
        if control is None or not row.get("novels"):
            continue
        cells = [
            *(_over(row.get("novels", str(n)), control.get("novels", str(n))) for n in LENGTHS[:3]),
            _over(row.get("novels", "32768"), row.get("novels", "8192"), 3),
            *_questions(row, control),
            _found(row, control, "passkey", 5),
            _found(row, control, "key_value", 20),
            share(row.get("cost", "bytes_ratio"), 1),
        ]
        lines.append(f"| {label} | {row.tokens:,} | {' | '.join(cells)} |")
    return _table(list(AGAINST), lines)


def _over(value: float | None, control: float | None, digits: int = 4) -> str:
    return "" if value is None or control is None else f"{value / control:#.{digits}g}"


def _questions(row: Figures, control: Figures) -> tuple[str, str]:
    """Return the four tasks' mean less the control's, in points, and LAMBADA over its, of the same items."""
    for measure in ("all_tasks", "tasks"):
        mine, other = row.all.get(measure), control.all.get(measure)
        if mine and other:
            points = 100 * (_mean(mine) - _mean(other))
            words = mine["lambada"]["value"] / other["lambada"]["value"]
            return f"{points:+.1f}" if abs(points) >= 0.05 else "0.0", share(words)
    return "", ""


def _mean(found: Json) -> float:
    return mean(found[name]["value"] for name in CHOICES)


def _found(row: Figures, control: Figures, what: str, questions: int) -> str:
    """Count what was found again, of so many questions at each length; in brackets by the control."""
    mine, other = row.get("recall", what), control.get("recall", what)
    if mine is None or other is None:
        return ""
    return f"{questions * sum(mine.values()):.0f} ({questions * sum(other.values()):.0f})"


def curves(figures: dict[str, Json], *measures: str) -> str:
    """Write the perplexities of patches that were just put in."""
    found: Json = {}
    for measure in measures:
        for name, row in figures.get(f"{measure}/original", {}).items():
            found[name] = found.get(name, {}) | row
    lengths = sorted({n for row in found.values() for n in row}, key=int)
    lines = [
        f"| `{name}` | {' | '.join(number(row.get(n)) for n in lengths)} |" for name, row in found.items()
    ]
    return _table([f"{int(n):,}" for n in lengths], lines)


def answers(rows: Iterable[Figures]) -> str:
    """Write what models answer, equal answers once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.row.name in ANSWERING and (text := row.get("answer", "text")):
            found.setdefault(" ".join(text.split()), []).append(f"**{row.row.name}**")
    return "".join(f"* {', '.join(names)}: {text}\n" for text, names in found.items())


def draw(rows: list[Figures], lengths: Path, tasks: Path) -> None:
    """Draw perplexity by length; and key-value recall over perplexity."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "study", "font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for axes, measure, title in zip(
            figure.subplots(1, 2), ("novels", "peps"), ("a novel (Emma)", "Python's PEPs"), strict=True
        ):
            for row in rows:
                if found := row.get(measure):
                    axes.plot(
                        [*map(int, found)], [*found.values()], "o-", label=row.row.name, lw=1.2, markersize=3
                    )
            axes.set(xscale="log", yscale="log", title=title, xlabel="tokens of context", ylabel="perplexity")
            axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.axvline(8192, color="grey", linewidth=0.8, linestyle=":")
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right center", frameon=False)
        figure.savefig(lengths, metadata={"Date": None})
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for row in rows:
            found, loss = row.get("recall", "key_value", "2048"), row.get("novels", "2048")
            if found is not None and loss is not None:
                axes.plot(loss, 100 * found, "o")
                axes.annotate(row.row.name, (loss, 100 * found), textcoords="offset points", xytext=(4, 4))
        axes.set(xlabel="perplexity of the novel at 2,048 tokens", ylabel="pairs found at 2,048 tokens, %")
        figure.savefig(tasks, metadata={"Date": None})


def renewed(page: str, figures: dict[str, Json], tokens: int) -> str:
    """Put the tables between their marks."""
    rows = [Figures(figures, row, tokens) for row in ROWS.values()]
    million = [Figures(figures, row, TOKENS) for row in ROWS.values()]
    more = [] if tokens == TOKENS else [row for row in million if row.row.of or row.row.share > 1]
    longest = {
        ROWS[name].slot(TOKENS): text.format(long=f"{ROWS[name].share * TOKENS:,}")
        for name, text in LONGEST.items()
    }
    short = {ROWS[name].slot(tokens): text.format(once=f"{tokens:,}") for name, text in SHORT_ROWS.items()}
    shown = [*rows, *more]
    controls = {row.tokens: row for row in shown if row.row.name in ("control", "control-long")}
    parts = {
        "table": table(rows, COLUMNS),
        "against": against(shown, controls),
        "smollm2": table(shown, {name: COLUMNS[name] for name in SHORT}, short | longest),
        "million": table(
            [row for row in million if row.slot != row.row.name], {name: COLUMNS[name] for name in MILLION}
        ),
        "sinks": table(rows, SINKS),
        "swapped": curves(figures, "swapped"),
        "logn": curves(figures, "logn", "logn_far"),
        "answers": answers(rows),
    }

    def part(found: re.Match[str]) -> str:
        return found[1] + parts[found[2]] + found[3] if found[2] in parts else found[0]

    return MARK.sub(part, page)


def main() -> None:
    """Collect the figures of a work folder, and write page and pictures."""
    parser = argparse.ArgumentParser(description="Write the tables of the study's pages and of the README.")
    parser.add_argument("--work-dir", type=Path, help="of the study (default: the stored figures alone)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of the rows to show (default: %(default)s)"
    )
    args = parser.parse_args()
    figures = collect(args.work_dir) if args.work_dir else load()
    for path in (PAGE, FINDINGS, README):
        content = renewed(path.read_text(encoding="utf-8"), figures, args.tokens)
        with replacing(path) as partial:
            partial.write_text(content, encoding="utf-8")
    rows = [Figures(figures, row, args.tokens) for row in ROWS.values()]
    draw(rows, DOCS / "images" / "smollm2-lengths.svg", DOCS / "images" / "smollm2-recall.svg")


if __name__ == "__main__":
    main()
