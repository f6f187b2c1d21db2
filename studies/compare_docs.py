"""Measure many patches of one model with --compare, and write the table and the plot into docs/perplexity.md.

python studies/compare_docs.py --work-dir W    # HF_LINATTN_DATA names the folder with models and texts
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_linattn.eval.common.markdown import write_between
from hf_linattn.eval.common.model_specs import is_reference
from hf_linattn.eval.common.models import ModelSpec
from hf_linattn.eval.perplexity import __main__ as perplexity
from hf_linattn.eval.perplexity.plot import save_plot

ROOT = Path(__file__).resolve().parent.parent
PAGE, IMAGE = ROOT / "docs" / "perplexity.md", "images/compare.svg"
MARKS = (
    "<!-- compare: written by `python studies/compare_docs.py --work-dir W` -->",
    "<!-- end of compare -->",
)
MODEL, TEXTS = "models/books-1m", "text/books/eval"
ENTRIES = "softmax,softmax@yarn:8,softmax@dynamic:8,softmax1,logn,softmax1+logn,logn@yarn:8,elu1"
SETTINGS = ("--lengths", "512,...,4096", "--max-tokens", "16384")


def words(model: str, texts: str, compare: str, output: str) -> list[str]:
    """Return the arguments of the perplexity command.

    Args:
        model: folder of the model.
        texts: folder of the texts.
        compare: entries to measure.
        output: folder of the results.
    """
    return ["--model", model, "--data", texts, *SETTINGS, "--compare", compare, "--output-dir", output]


def section(results: Mapping[str, Any], compare: str) -> str:
    """Write the command, the table and the picture as Markdown."""
    rows = results["rows"]
    labels, lengths = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "length"))
    perplexities = {(row["model"], row["length"]): row["perplexity"] for row in rows}
    lines = [
        "```text",
        f"python -m hf_linattn.eval.perplexity --model $HF_LINATTN_DATA/{MODEL} \\",
        f"    --data $HF_LINATTN_DATA/{TEXTS} {' '.join(SETTINGS)} \\",
        f"    --compare {shlex.quote(compare)} \\",
        "    --output-dir out",
        "```",
    ]
    facts = [
        f"{results['data']['documents']} novels",
        f"{rows[0]['tokens']:,} scored tokens, the same at every length",
        "float32",
        f"torch {results['versions']['torch']}, transformers {results['versions']['transformers']}",
    ]
    lines += ["", "Perplexity by tokens of context:", ""]
    lines += ["| entry | " + " | ".join(f"{length:,}" for length in lengths) + " |"]
    lines += ["|---" * (len(lengths) + 1) + "|"]
    for label in labels:
        cells = (f"{perplexities[label, length]:,.1f}" for length in lengths)
        lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
    lines += ["", f"({'; '.join(facts)}.)"]
    return "\n".join([*lines, "", f"![Perplexity against context length for each entry]({IMAGE})"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write; the exit status is that of the perplexity command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        default=os.environ.get("HF_LINATTN_DATA"),
        help="folder with models and texts",
    )
    add("--work-dir", type=Path, required=True, help="folder of the measurement; resumes there")
    add("--compare", default=ENTRIES, help="entries to measure (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.data_dir is None:
        parser.error("HF_LINATTN_DATA is not set: give --data-dir")
    command = words(str(args.data_dir / MODEL), str(args.data_dir / TEXTS), args.compare, str(args.work_dir))
    if status := perplexity.main(command):
        return status
    results = json.loads((args.work_dir / "results.json").read_text(encoding="utf-8"))
    write_between(PAGE, MARKS, section(results, args.compare) + "\n", head="")
    curves = [ModelSpec(**{**curve, "options": dict(curve["options"])}) for curve in results["models"]]
    reference = {curve.label for curve in curves if is_reference(curve)}
    image = PAGE.parent / IMAGE
    save_plot(image, results["rows"], results["train_length"], reference=reference, kind="svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
