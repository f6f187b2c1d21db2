"""One page about a comparison: curves, table, losses, samples, commands, and what the numbers mean.

python -m hf_linattn.eval.report --runs out/runs --perplexity out/perplexity --output report.html
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linattn.errors import DataError, LinattnError

EPILOG = """\
example:
  python -m hf_linattn.eval.report --runs out/runs --perplexity out/perplexity --samples out/samples.json \\
      --results out/results.json --output out/report.html

--runs holds a folder per fine-tuning run (results.json, train.csv of hf_linattn.finetune), --perplexity one
per measurement (results.json of hf_linattn.eval.perplexity); folders of the same name belong together. The
run without fine-tuning is the original, the one fine-tuned without a patch the control. --diagnose adds what
hf_linattn.eval.diagnose found: one of its folders, or a folder of them. --results also writes the summary
table as that file and, ending in .csv, beside it.
"""

PROMPT_SHOWN = 420
"""Characters from the end of a prompt that the page shows."""


def render(summary: Any, *, title: str, notes: Sequence[str] = (), diagnoses: Sequence[Any] = ()) -> str:
    """The page as HTML: one file without any address in it.

    Args:
        summary: what `summary.collect` gives.
        title: heading of the page.
        notes: sentences about the data, shown below the heading.
        diagnoses: what `diagnosis_page.collect` gives.
    """
    import jinja2

    from . import findings
    from .diagnosis_page import COLUMNS
    from .figures import COLOURS, bucket_curves, length_curves, loss_curves

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=findings.number, size=findings.size, change=findings.change)
    patched = [run.name for run in summary.patched]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(patched)}
    return environment.get_template("report.html.j2").render(
        title=title,
        notes=list(notes),
        summary=summary,
        colours=colours,
        figures={
            "lengths": length_curves(summary),
            "losses": loss_curves(summary),
            "buckets": bucket_curves(summary),
        },
        findings=[_markup(text) for text in findings.findings(summary)],
        cautions=[_markup(text) for text in findings.cautions(summary)] if summary.runs else [],
        prompts=[_prompt(summary, index) for index in range(len(summary.prompts))],
        best=_best_by_length(summary),
        diagnoses=list(diagnoses),
        diagnosis_columns=COLUMNS.values(),
        exponential=findings.exponential,
        machine=_machine(),
    )


def _markup(text: str) -> Any:
    """A sentence of `findings` as HTML: its <b> stays, everything else is escaped."""
    from markupsafe import Markup, escape

    parts = [str(escape(part)) for part in text.replace("</b>", "<b>").split("<b>")]
    return Markup("".join(f"<b>{part}</b>" if index % 2 else part for index, part in enumerate(parts)))


def _prompt(summary: Any, index: int) -> dict[str, Any]:
    text = summary.prompts[index]
    runs = [(run, continued) for run in summary.runs for at, continued in run.samples if at == index]
    return {
        "cut": len(text) > PROMPT_SHOWN,
        "text": text[-PROMPT_SHOWN:],
        "characters": len(text),
        "runs": runs,
    }


def _best_by_length(summary: Any) -> dict[int, float]:
    return {
        length: min(run.perplexities[length] for run in summary.runs if length in run.perplexities)
        for length in summary.lengths
    }


def _machine() -> str:
    """Processor, cores, system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def write_results(path: Path, summary: Any) -> None:
    """The summary table as JSON, and as CSV beside it."""
    from hf_linattn.checkpointing import replacing, write_json

    from .summary import as_rows

    rows = as_rows(summary)
    content = {
        "format": "hf_linattn.summary/1",
        "lengths": summary.lengths,
        "train_length": summary.train_length,
        "versions": summary.versions,
        "machine": _machine(),
        "rows": rows,
        "commands": {run.name: run.commands for run in summary.runs},
    }
    write_json(path, content)
    with (
        replacing(path.with_suffix(".csv")) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.report",
        description="Write one self-contained HTML page from fine-tuning and perplexity results.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--runs", type=Path, help="folder of fine-tuning runs")
    add("--perplexity", type=Path, help="folder of perplexity results")
    diagnose_help = "folder of the diagnose command, or a folder of such folders; repeatable"
    add("--diagnose", type=Path, action="append", default=[], metavar="DIR", help=diagnose_help)
    add("--samples", type=Path, help="file of hf_linattn.eval.sample")
    add("--commands", type=Path, help="JSON object: run -> its commands (default: those in the results)")
    add("--note", action="append", default=[], help="sentence to show below the heading; repeatable")
    add("--title", default="Attention, swapped", help="heading (default: %(default)s)")
    add("--results", type=Path, help="also write the summary table to this .json and a .csv beside it")
    add("--output", type=Path, required=True, help="HTML file to write")
    return parser


def run(args: argparse.Namespace) -> None:
    """Read, render, write.

    Raises:
        DataError: results are missing, damaged, unfinished or not comparable.
    """
    from hf_linattn.checkpointing import replacing

    from . import diagnosis_page
    from .summary import Summary, collect

    if args.runs is None and args.perplexity is None and not args.diagnose:
        raise DataError("nothing to report: give --runs, --perplexity, --diagnose or several of them")
    diagnoses = diagnosis_page.collect(args.diagnose) if args.diagnose else []
    if args.runs is None and args.perplexity is None:
        if args.results is not None:
            raise DataError("--results is the table of --runs and --perplexity: give one of them")
        summary = Summary([], None, {}, {}, diagnoses[0].versions, [])
    else:
        summary = collect(args.runs, args.perplexity, args.samples, args.commands)
    page = render(summary, title=args.title, notes=args.note, diagnoses=diagnoses)
    for path in filter(None, (args.output, args.results)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.results is not None:
        write_results(args.results, summary)
    with replacing(args.output) as partial:
        partial.write_text(page, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except LinattnError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install 'hf-linattn[plots]'", file=sys.stderr)
        return 1
    print(f"report: {args.output.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
