"""Write the tables of the README from the registry and from a run of the demo.

    python tests/docs_tables.py                    # the table of patches
    python tests/docs_tables.py --demo demo-out    # the results too
"""

from __future__ import annotations

import argparse
import inspect
import shutil
from pathlib import Path

from hf_linattn.registry import patches, signature

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def patch_table() -> str:
    lines = ["| patch | what it does | options | time, state |", "|---|---|---|---|"]
    for name, cls in patches().items():
        summary = (inspect.getdoc(cls) or "").partition("\n")[0]
        options = ", ".join(f"`{key}={p.default!r}`" for key, p in signature(cls).items()) or "-"
        cost = "O(n), constant" if cls.linear else "as the attention it joins" if cls.modifier else "O(n^2), grows"
        lines.append(f"| `{name}` | {summary} | {options} | {cost} |")
    return "\n".join(lines)


def replaced(text: str, section: str, content: str) -> str:
    start = text.index(f"<!-- {section}:")
    first = text.index("\n", start) + 1
    last = text.index(f"<!-- end of {section} -->")
    return text[:first] + content.strip() + "\n" + text[last:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="output folder of the demo")
    args = parser.parse_args(argv)
    text = replaced(README.read_text(encoding="utf-8"), "patches", patch_table())
    if args.demo:
        text = replaced(text, "results", (args.demo / "results.md").read_text(encoding="utf-8"))
        shutil.copy(args.demo / "length_curve.png", ROOT / "docs" / "images" / "length_curve.png")
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
