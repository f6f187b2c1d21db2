"""One page about any number of result folders: table, curves, recall, losses, cost, commands.

python -m hf_linattn.eval.report out/ --output report.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linattn.cli.main import exit_status
from hf_linattn.errors import DataError

from ..common.results import machine

EPILOG = """\
examples (`report` stands for `python -m hf_linattn.eval.report`):
  # everything that is in out/ and up to two levels below it
  report out/ --output report.html

  # some folders; the table also as json and csv
  report tuned/elu1 tuned/control out/perplexity out/recall out/cost --results table.json --output report.html

  # which rows the others are compared with, where that is not clear
  report out/ --original books-1m --control control --output report.html

  # fine-tuning and perplexity runs of a demo, paired by the names of their folders
  report --runs out/runs --perplexity out/perplexity --samples out/samples.json --output report.html

Folders are recognised by what lies in them: results of hf_linattn.finetune, hf_linattn.convert and, of
hf_linattn.eval, perplexity, recall, generation, branches, diagnose and cost. Results of the same model become
one row: the model that they name is the same folder, else a folder of the same name. The original is the row
with its own attention that was not trained and that trained rows came from; the control the one trained with
its own attention. What was not measured is a dash. Results that were not asked the same (other text, lengths,
stride, machine ...) get different letters, figures of their own, and no ratio. docs/report.md says more.

--diagnose adds what hf_linattn.eval.diagnose found: one of its folders, or a folder of them. --results also
writes the table as that file and, ending in .csv, beside it.
"""

PROMPT_SHOWN = 420
"""Characters from the end of a prompt that the page shows."""


def render(summary: Any, *, title: str, notes: Sequence[str] = (), diagnoses: Sequence[Any] = ()) -> str:
    """The page as HTML: one file without any address in it.

    Args:
        summary: what `summary.collect` gives.
        title: heading of the page.
        notes: sentences about the data, shown below the heading.
        diagnoses: what `diagnosis.collect` gives.
    """
    from ..common.plotting import COLOURS
    from . import findings
    from .diagnosis import COLUMNS
    from .figures import bucket_curves, length_curves, loss_curves

    patched = [run.name for run in summary.patched]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(patched)}
    page: str = (
        environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            notes=list(notes),
            summary=summary,
            colours=colours,
            figures={
                "lengths": length_curves(summary),
                "losses": loss_curves(summary),
                "buckets": bucket_curves(summary),
            },
            findings=[markup(text) for text in findings.findings(summary)],
            cautions=[markup(text) for text in findings.cautions(summary)] if summary.runs else [],
            prompts=[_prompt(summary, index) for index in range(len(summary.prompts))],
            best=_best_by_length(summary),
            diagnoses=list(diagnoses),
            diagnosis_columns=COLUMNS.values(),
            exponential=findings.exponential,
            machine=machine(),
        )
    )
    return page


def environment() -> Any:
    """Templates of this folder."""
    import jinja2

    from . import findings

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(number=findings.number, size=findings.size, change=findings.change)
    return found


def markup(text: str) -> Any:
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


def write_results(path: Path, summary: Any) -> None:
    """The summary table as JSON, and as CSV beside it."""
    from hf_linattn.cli.files import write_json

    from ..common.results import save_csv
    from .summary import as_rows

    rows = as_rows(summary)
    content = {
        "format": "hf_linattn.summary/1",
        "lengths": summary.lengths,
        "train_length": summary.train_length,
        "versions": summary.versions,
        "machine": machine(),
        "rows": rows,
        "commands": {run.name: run.commands for run in summary.runs},
    }
    write_json(path, content)
    save_csv(path.with_suffix(".csv"), rows)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.report",
        description="Write one self-contained HTML page that compares any number of result folders.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    folder_help = "folder with results of any of the commands below, or a folder of such folders"
    add("folders", nargs="*", type=Path, metavar="FOLDER", help=folder_help)
    add("--original", metavar="NAME", help="row of the model as it came (default: derived)")
    add("--control", metavar="NAME", help="row fine-tuned with its own attention (default: derived)")
    add("--runs", type=Path, help="folder of fine-tuning runs, paired with --perplexity by name")
    add("--perplexity", type=Path, help="folder of perplexity results")
    diagnose_help = "folder of the diagnose command, or a folder of such folders; repeatable"
    add("--diagnose", type=Path, action="append", default=[], metavar="DIR", help=diagnose_help)
    add("--samples", type=Path, help="file of hf_linattn.eval.sample")
    add("--commands", type=Path, help="JSON object: run -> its commands (default: those in the results)")
    add("--note", action="append", default=[], help="sentence to show below the heading; repeatable")
    add("--title", default="Attention, swapped", help="heading (default: %(default)s)")
    add("--results", type=Path, help="also write the table to this .json and a .csv beside it")
    add("--output", type=Path, required=True, help="HTML file to write")
    return parser


def run(args: argparse.Namespace) -> None:
    """Read, render, write.

    Raises:
        DataError: results are missing, damaged, unfinished or not comparable.
    """
    from hf_linattn.cli.files import replacing

    from . import page as report_page

    if args.folders:
        page, table = _of_folders(args)
    else:
        page, table = _of_runs(args)
    for path in filter(None, (args.output, args.results)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.results is not None:
        if args.folders:
            report_page.write_results(args.results, table)
        else:
            write_results(args.results, table)
    with replacing(args.output) as partial:
        partial.write_text(page, encoding="utf-8")


def _of_folders(args: argparse.Namespace) -> tuple[str, Any]:
    """The page over FOLDERs, and what its table is made of."""
    from . import page as report_page
    from .discover import walk
    from .rows import compare
    from .summary import _read

    if args.runs is not None or args.perplexity is not None or args.commands is not None:
        raise DataError("FOLDER takes every kind of results: give folders, or --runs and --perplexity")
    found = compare(walk([*args.folders, *args.diagnose]), original=args.original, control=args.control)
    samples = _read(args.samples) if args.samples is not None else {}
    return report_page.render(found, title=args.title, notes=args.note, samples=samples), found


def _of_runs(args: argparse.Namespace) -> tuple[str, Any]:
    """The page over --runs and --perplexity, and what its table is made of."""
    from . import diagnosis
    from .summary import Summary, collect

    if args.runs is None and args.perplexity is None and not args.diagnose:
        raise DataError(
            "nothing to report: give --runs, --perplexity, --diagnose or several of them, or any folders"
        )
    if args.original is not None or args.control is not None:
        raise DataError("--original and --control name rows of FOLDERs: give those")
    diagnoses = diagnosis.collect(args.diagnose) if args.diagnose else []
    if args.runs is None and args.perplexity is None:
        if args.results is not None:
            raise DataError("--results is the table of --runs and --perplexity: give one of them")
        summary = Summary([], None, {}, {}, diagnoses[0].versions, [])
    else:
        summary = collect(args.runs, args.perplexity, args.samples, args.commands)
    return render(summary, title=args.title, notes=args.note, diagnoses=diagnoses), summary


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    args = build_parser().parse_args(argv)

    def work() -> None:
        run(args)
        print(f"report: {args.output.resolve()}")

    return exit_status(work, interrupted="nothing was written", extra="plots")


if __name__ == "__main__":
    sys.exit(main())
