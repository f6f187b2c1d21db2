"""Write one page about any number of result folders: table, curves, recall, losses, cost, samples, commands.

python -m hf_linattn.eval.report out/ --output report.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linattn.errors import DataError, OptionError

from ..common.cli import command_parser, run_command

EPILOG = """\
examples (`report` stands for `python -m hf_linattn.eval.report`):
  # everything that is in out/ and up to two levels below it
  report out/ --output report.html

  # some folders; the table also as json and csv
  report tuned/elu1 tuned/control out/perplexity out/recall out/cost --results table.json --output report.html

  # which rows the others are compared with, where that is not clear
  report out/ --original books-1m --control control --output report.html

  # with texts that the models wrote, from hf_linattn.eval.generation --prompt
  report out/ --samples out/samples.json --output report.html

Folders are recognised by what lies in them: results of hf_linattn.finetune, hf_linattn.convert and, of
hf_linattn.eval, perplexity, recall, generation, branches and diagnose, and of hf_linattn.bench --cost.
Results of the same model become one row: the model that they name is the same folder, else a folder of the
same name. The original is the row with its own attention that was not trained and that trained rows came
from; the control the one trained with its own attention. What was not measured is a dash. Results that were
not measured alike (other text, lengths, stride, machine ...) get different letters, figures of their own, and
no ratio. docs/report.md says more.

--results writes the table as that file and as .csv next to it.
"""

OTHER_NAMES = ("runs", "perplexity", "diagnose")
"""Options that stood for folders of one kind, and are folders like others now."""


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    description = "Write one self-contained HTML page that compares any number of result folders."
    parser = command_parser("report", description, EPILOG)
    add = parser.add_argument
    folder_help = "folder with results of any of the commands below, or a folder of such folders"
    add("folders", nargs="*", type=Path, metavar="FOLDER", help=folder_help)
    add("--original", metavar="NAME", help="row of the pretrained model (default: derived)")
    add("--control", metavar="NAME", help="row fine-tuned with its own attention (default: derived)")
    for name in OTHER_NAMES:
        other_help = "another name of FOLDER, for this release"
        add(f"--{name}", type=Path, action="append", default=[], metavar="DIR", help=other_help)
    add("--samples", type=Path, help="texts that hf_linattn.eval.generation --prompt wrote")
    commands_help = "JSON object: row, or folder of its results, which it is then called -> its commands"
    add("--commands", type=Path, help=f"{commands_help} (default: those in the results)")
    add("--note", action="append", default=[], help="sentence to show below the heading; repeatable")
    add("--title", default="Attention, swapped", help="heading (default: %(default)s)")
    add("--results", type=Path, help="also write the table to this .json and a .csv next to it")
    add("--output", type=Path, required=True, help="HTML file to write")
    return parser


def _run(args: argparse.Namespace, command: str) -> str:
    """Read, render and write; return what is printed."""
    from hf_linattn.cli.files import replacing

    from .discover import discover
    from .page import render, write_results
    from .rows import compare

    if args.results is not None:
        if args.results.suffix == ".csv":
            raise OptionError("--results is a .json; its .csv is written next to it")
        if args.output.resolve() in (args.results.resolve(), args.results.with_suffix(".csv").resolve()):
            raise OptionError("--output and --results are the same file")
    older = [(name, folder) for name in OTHER_NAMES for folder in getattr(args, name)]
    folders = [*args.folders, *(folder for _, folder in older)]
    if not folders:
        raise DataError("nothing to report: give folders with results")
    comparison = compare(
        discover(folders),
        original=args.original,
        control=args.control,
        samples=args.samples,
        commands=args.commands,
    )
    page = render(comparison, title=args.title, notes=args.note)
    for path in filter(None, (args.output, args.results)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.results is not None:
        write_results(args.results, comparison)
    with replacing(args.output) as partial:
        partial.write_text(page, encoding="utf-8")
    for name, folder in older:
        sys.stderr.write(f"note: --{name} will go with the next release: give {folder} as a FOLDER\n")
    return f"report: {args.output.resolve()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    return run_command(build_parser(), _run, argv, needs="plots")


if __name__ == "__main__":
    sys.exit(main())
