"""What a run found, as a part of a page: written between its markers, the rest of the page stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_check

Row = dict[str, Any]
BEGIN = "<!-- gpu_check: what follows is written by gpu_check.py --docs -->"
END = "<!-- gpu_check: end -->"
KINDS = {
    "prefill": "prefill",
    "decode": "a token behind",
    "decode graph": "likewise, graph,",
    "train": "training step",
}
"""What stage `models` times, as heads of columns."""


def write(page: Path, folder: Path) -> None:
    """Put the figures of a run into a page, in the place of those of a run before, or at its end.

    Raises:
        Refused: the folder holds no run, or one without figures, or the page has one marker alone.
    """
    run = folder / "run.json"
    if not run.exists():
        raise gpu_check.Refused(f"{folder} holds no run of gpu_check.py")
    about = json.loads(run.read_text(encoding="utf-8"))
    if about.get("dry_run"):
        raise gpu_check.Refused(f"{folder} holds a dry run, which has no figures")
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = text.count(BEGIN), text.count(END)
    if found not in ((0, 0), (1, 1)) or text.find(END) < text.find(BEGIN):
        raise gpu_check.Refused(
            f"{page} has its markers {found[0]} and {found[1]} times: mend or delete them"
        )
    if found == (0, 0):
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n".lstrip()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    new = f"{before}{BEGIN}\n\n{body(about, folder)}\n{END}{after}"
    partial = page.with_name(page.name + ".partial")
    partial.write_text(new, encoding="utf-8")
    partial.replace(page)


def body(about: Row, folder: Path) -> str:
    """Write all parts."""
    rows = {stage: list(gpu_check.read(folder / f"{stage}.jsonl").values()) for stage in gpu_check.STAGES}
    done = " ".join(stage for stage in gpu_check.STAGES if rows[stage])
    versions = ", ".join(
        f"{name} {about[name]}" for name in ("torch", "triton", "transformers", "hf_linattn")
    )
    parts = [
        "## Measured",
        f"`python gpu_check.py {done} --output-dir OUT` on one {about['device']}: {versions}, kernels "
        f"`{about['kernels']}`. `make gpu-kit` builds the folder that holds it.",
    ]
    for stage, part in (
        ("correct", _correct),
        ("patches", _patches),
        ("kernels", _kernels),
        ("models", _models),
        ("length", _length),
        ("train", _train),
    ):
        if rows[stage]:
            parts += part(rows[stage])
    failed = [(stage, row) for stage in rows for row in rows[stage] if not row["ok"]]
    if failed:
        parts.append(f"**Failed**, {len(failed)} cases:")
        parts.append("\n".join(f"* {stage}, {_words(row['case'])}: {row['error']}" for stage, row in failed))
    return "\n\n".join(parts) + "\n"


def _words(case: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items() if key != "case" or value != "size")


def table(heads: list[str], body: list[list[str]]) -> str:
    """Write a table in Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) and value < 1000 else f"{value:,.0f}"


def _correct(rows: list[Row]) -> list[str]:
    """By dtype: how many forms and sizes, and the largest error of a whole result."""
    body = []
    for dtype in dict.fromkeys(row["case"].get("dtype") for row in rows):
        own = [row for row in rows if dtype and row["case"].get("dtype") == dtype]
        sizes = [row for row in own if "worst" in row]
        if not own:
            continue
        worst = f"{max(row['worst'] for row in sizes):.1e}" if sizes else "-"
        same = sum(row["same_bits"] for row in sizes)
        failed = sum(not row["ok"] for row in own)
        body.append(
            [
                dtype,
                str(len(own) - len(sizes)),
                str(len(sizes)),
                worst,
                f"{same} of {len(sizes)}",
                str(failed),
            ]
        )
    heads = ["dtype", "forms", "sizes", "largest relative error", "the same bits twice", "failed"]
    return ["Kernels against float64:", table(heads, body)] if body else []


def _patches(rows: list[Row]) -> list[str]:
    """By dtype: how many patches, and the largest error of logits and gradients."""
    body = []
    for dtype in dict.fromkeys(row["case"]["dtype"] for row in rows):
        own = [row for row in rows if row["case"]["dtype"] == dtype]
        found = [row["errors"] for row in own if "errors" in row]
        worst = [
            f"{max(errors[name] for errors in found):.1e}" if found else "-"
            for name in ("logits", "decoded", "gradient")
        ]
        body.append([dtype, str(len(found)), *worst, str(sum(not row["ok"] for row in own))])
    heads = ["dtype", "patches", "largest error of logits", "of decoded ones", "of the gradient", "failed"]
    return ["A small Llama with each patch against the same model in float64:", table(heads, body)]


def _kernels(rows: list[Row]) -> list[str]:
    machine = next((row for row in rows if "tb_s" in row), {})
    parts = []
    if machine:
        speeds = f"{machine['tflops']:.0f} TFLOP/s, a copy at {machine['tb_s']:.2f} TB/s"
        parts.append(f"A product in bfloat16 ran at {speeds}.")
    calls = [row for row in rows if "both" in row]
    for shape in dict.fromkeys(_shape(row["case"]) for row in calls):
        own = [row for row in calls if _shape(row["case"]) == shape]
        body = []
        for row in own:
            forward, both = (row.get(f"{name}_graph", row[name]) for name in ("forward", "both"))
            eager = f"{_number(row['forward'])} / {_number(row['both'] - row['forward'])}"
            cells = [_number(forward), _number(both - forward), eager, _number(row.get("peak_mb", 0))]
            body.append([row["case"]["case"], *cells])
        heads = [shape, "forward, ms", "backward, ms", "eager, ms", "peak, MB"]
        parts.append(table(heads, body))
    tokens = [row for row in rows if "token" in row and "bytes" in row]
    if tokens:
        body = []
        for row in tokens:
            took = row.get("token_graph", row["token"])
            least = row["bytes"] / machine["tb_s"] / 1e9 if machine else None
            share = "-" if least is None else f"{least / took:.0%}"
            cells = [_number(took), _number(row["token"]), share]
            body.append([_shape(row["case"]), row["case"]["case"], *cells])
        heads = ["one token", "form", "ms", "eager, ms", "its bytes, of the copy's TB/s"]
        parts.append(table(heads, body))
    tiles = [row for row in rows if row["case"]["case"] == "tiles" and "best" in row]
    if tiles:
        body = [[_words({**row["case"], "case": "size"}), _gains(row)] for row in tiles]
        parts += [
            "Tiles, chosen by compiling against measured ones:",
            table(["tiles for", "times as fast"], body),
        ]
    return parts


def _gains(row: Row) -> str:
    gains = [(name, row.get(f"{name}_gain", 1.0)) for name in row["best"]]
    return ", ".join(f"{name} {gain:.2f}" for name, gain in gains) or "none is faster"


def _shape(case: Row) -> str:
    heads = f"{case['heads']}" if case["heads"] == case["kv_heads"] else f"{case['heads']}/{case['kv_heads']}"
    return f"{case['batch']} x {heads} x {case['length']:,} x {case['width']}"


def _models(rows: list[Row]) -> list[str]:
    """Of each model: milliseconds by patch, kind and length, and how many times as fast as softmax."""
    parts = []
    for model in dict.fromkeys(row["case"]["model"] for row in rows):
        found: dict[tuple[str, str], dict[tuple[str, int], float | None]] = {}
        for row in (row for row in rows if row["case"]["model"] == model):
            case = row["case"]
            of_form = found.setdefault((case["patch"], case["kernels"]), {})
            if not row["ok"] or "ms" in row:
                of_form[case["kind"], case["length"]] = row["ms"] if row["ok"] else None
            if "ms_graph" in row:
                of_form[case["kind"] + " graph", case["length"]] = row["ms_graph"]
        names = list(KINDS)
        columns = sorted({column for of_form in found.values() for column in of_form})
        columns.sort(key=lambda column: names.index(column[0]))
        softmax = found.get(("softmax", "none"), {})
        body = []
        for (patch, how), of_form in found.items():
            name = {"on": f"{patch}, kernels", "off": f"{patch}, torch operations"}.get(how, patch)
            beside = {} if of_form is softmax else softmax
            body.append([name, *(_beside(of_form, beside, column) for column in columns)])
        heads = [f"{model}, ms", *(f"{KINDS[kind]} {length:,}" for kind, length in columns)]
        parts.append(table(heads, body))
    return [*parts, "In brackets: times as fast as softmax."]


def _beside(found: dict[Any, float | None], softmax: dict[Any, float | None], column: Any) -> str:
    if column not in found:
        return "-"
    ms, other = found[column], softmax.get(column)
    if ms is None:
        return "failed"
    return _number(ms) if other is None else f"{_number(ms)} ({other / ms:.2f})"


def _length(rows: list[Row]) -> list[str]:
    body = [
        [
            f"{row['case']['patch']}, {row['case']['dtype']}",
            f"{row['case']['tokens']:,}",
            *(_number(row[name]) for name in ("perplexity_kernels", "perplexity_torch")),
            f"{row['apart']:.1e}",
            f"{row['seconds_torch'] / row['seconds_kernels']:.2f}",
        ]
        for row in rows
        if "apart" in row
    ]
    heads = [
        "books-1m, untrained",
        "tokens",
        "perplexity, kernels",
        "torch operations",
        "nats apart",
        "times as fast",
    ]
    return [table(heads, body)] if body else []


def _train(rows: list[Row]) -> list[str]:
    body = [
        [
            row["case"]["patch"],
            *(f"{row[name][0]:.3f} to {row[name][-1]:.3f}" for name in ("losses_kernels", "losses_torch")),
            f"{row['apart']:.1e}",
        ]
        for row in rows
        if "losses_kernels" in row
    ]
    heads = ["books-1m, fine-tuned in bfloat16", "loss with kernels", "without", "apart on average"]
    return [table(heads, body)] if body else []
