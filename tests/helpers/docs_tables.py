"""Write the tables of the README from the registry and from a run of the demo.

python -m tests.helpers.docs_tables                    # the table of patches
python -m tests.helpers.docs_tables --demo demo-out    # the results too
"""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

from hf_linattn.demo import hybrid
from hf_linattn.eval.report.discover import discover
from hf_linattn.eval.report.figures import length_curves
from hf_linattn.eval.report.rows import compare
from hf_linattn.registry import patches
from tools.catalogue.docstrings import GROUPS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXT = """
<picture>
<source media="(prefers-color-scheme: dark)" srcset="docs/images/length_curve_dark.svg">
<img alt="Perplexity against context length for each run" src="docs/images/length_curve.svg">
</picture>

`make demo`: perplexity by tokens of context on held-out files, the same scored tokens at every length, +- the
standard error over files. `hybrid` is a window of {size} tokens and a state that forgets
(`{patch}`), made of the model by `convert`; the others were fine-tuned. All but `unpatched` read {tokens:,}
tokens of the same text. One seed, float32, one thread a process; {machine};
torch {torch}, transformers {transformers}.

"""


def patch_table() -> str:
    """Return a row per group of patches, each name a link to its entry."""
    lines = ["| kind | patches |", "|---|---|"]
    for group, described in GROUPS.items():
        page = f"docs/patches/{described.page}"
        names = [name for name, cls in patches().items() if cls.group == group]
        links = " · ".join(f"[`{name}`]({page}#{name})" for name in names)
        lines.append(f"| [{described.title}]({page}) | {links} |")
    assert {cls.group for cls in patches().values()} == GROUPS.keys()
    return "\n".join(lines)


def results_table(demo: Path) -> str:
    """Perplexity by length of every run of the demo, with what stands behind the numbers."""
    results = json.loads((demo / "results.json").read_text(encoding="utf-8"))
    lengths = results["lengths"]
    lines = ["| run | " + " | ".join(f"{length:,}" for length in lengths) + " | state per sequence |"]
    lines.append("|---" * (len(lengths) + 2) + "|")
    for row in sorted(results["rows"], key=lambda row: row["row"] != hybrid.NAME):
        cells = [f"{row[f'perplexity_{length}']:.1f} +- {row[f'stderr_{length}']:.1f}" for length in lengths]
        state = (
            f"{row['bytes_per_token']:,} B per token"
            if row["bytes_per_token"]
            else f"{row['state_bytes']:,} B"
        )
        lines.append(f"| {row['row']} | " + " | ".join(cells) + f" | {state} |")
    tokens = max(row["training_tokens"] or 0 for row in results["rows"])
    named = {"size": hybrid.OPTIONS["size"], "patch": hybrid.PATCH}
    text = TEXT.format(tokens=tokens, **named, machine=results["machine"], **results["versions"])
    return text + "\n".join(lines)


def write_figure(demo: Path) -> None:
    comparison = compare(discover([demo / "runs", demo / "perplexity"]), commands=demo / "commands.json")
    comparison.rows.sort(key=lambda row: row.name != hybrid.NAME)  # first, as in the table
    picture = length_curves(comparison, comparison.curves[0])
    for name, uri in (("length_curve.svg", picture.light), ("length_curve_dark.svg", picture.dark)):
        (ROOT / "docs" / "images" / name).write_bytes(base64.b64decode(uri.partition("base64,")[2]))


def replaced(text: str, section: str, content: str) -> str:
    start = text.index(f"<!-- {section}:")
    first = text.index("\n", start) + 1
    last = text.index(f"<!-- end of {section} -->")
    return text[:first] + content.strip() + "\n" + text[last:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, help="output folder of the demo")
    args = parser.parse_args(argv)
    text = replaced(README.read_text(encoding="utf-8"), "patches", patch_table())
    if args.demo:
        text = replaced(text, "results", results_table(args.demo))
        write_figure(args.demo)
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
