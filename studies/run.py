"""Convert small models in many ways, beside a control trained on the same tokens, and measure what is left.

python studies/run.py --data $HF_LINATTN_DATA --work-dir W --output studies/results.md
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import commands
from figures import collect, load, measured, write
from page import page, write_page
from plan import BASES, HERE, RANKED, SEEDS, TABLES, Experiment, Workspace, kept_rows, rows_of
from texts import prepare

from hf_linattn.cli.jobs import Job, last_step, run_jobs
from hf_linattn.errors import LinattnError

EPILOG = """\
examples (`study` stands for `python studies/run.py --data $HF_LINATTN_DATA --work-dir W`):
  study --output studies/results.md       # everything that is missing, then the page: a day on two cores
  study --base books --tables lengths --seeds 0 --output studies/results.md
  study --base books --rows control hedgehog --seeds 0 1 2
  study --list                            # the commands, and which are done
  study --no-run --output studies/results.md   # the page alone, with what there is

The base `recall` is what studies/pretrain_recall.py leaves, as W/recall-base. Every figure is made by a
command of the package, each its own process with a log in W/logs. Killed at any moment, the same command goes
on; what is measured is not measured again, nor what stands beside the page (studies/results.json for
studies/results.md), which is enough to go on without the work folder.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description="Convert small models in many ways, with a control, and write down what is left of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with models/ and text/")
    add("--work-dir", type=Path, required=True, help="folder for models and results; resumes there")
    output_help = "the page to write, and beside it its figures as .json (default: none)"
    add("--output", type=Path, help=output_help)
    add("--base", nargs="+", choices=BASES, default=[*BASES], help="models to convert (default: all)")
    add("--tables", nargs="+", choices=TABLES, default=[*TABLES], help="tables to measure (default: all)")
    add("--rows", nargs="+", metavar="ROW", help="only these rows")
    add("--seeds", nargs="+", type=int, default=[*SEEDS], help="only these seeds (default: all)")
    add("--jobs", type=int, default=2, help="processes side by side, a thread each (default: %(default)s)")
    add("--no-run", action="store_true", help="measure nothing")
    add("--list", action="store_true", help="print the commands and whether they are done, and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        _study(parser, args)
    except LinattnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _study(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    work = args.work_dir.resolve()
    stored = args.output.with_suffix(".json") if args.output else None
    figures = collect(load(stored) if stored else {}, work)
    workspaces = [Workspace(BASES[name], args.data, work, figures) for name in args.base]
    known = {row.name for rows in TABLES.values() for row in rows}
    known |= {name for workspace in workspaces for name in kept_rows(workspace)}
    if unknown := set(args.rows or ()) - known:
        parser.error(f"no row is called {', '.join(sorted(unknown))}")
    jobs = all_jobs(workspaces, args)
    if args.list:
        for job in [*jobs, *kept_jobs(workspaces, args)]:
            print(f"{'done' if job.finished() else 'open'}  {shlex.join(job.command[1:])}")
        return
    if not args.no_run:
        for workspace in workspaces:
            prepare(workspace)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        run_jobs(jobs, work / "logs", args.jobs, environment)
        collect(figures, work)
        run_jobs(kept_jobs(workspaces, args), work / "logs", args.jobs, environment)
        collect(figures, work)
    if stored:
        write(stored, figures)
        write_page(args.output, page(args.data, work, figures))


def all_jobs(workspaces: Sequence[Workspace], args: argparse.Namespace) -> list[Job]:
    """Return all jobs but those of hybrids that keep softmax layers, known when layers are ranked."""
    jobs = [
        job
        for seed in args.seeds
        for workspace in workspaces
        for job in jobs_for(workspace, rows_of(workspace.base, args.tables), args, seed)
    ]
    if not args.rows and SEEDS[0] in args.seeds:  # nothing is left out that these wait for
        jobs += [_layers_job(each) for each in workspaces if _keeps_layers(each, args)]
        jobs.append(_scale_job(workspaces[0]))
    return jobs


def kept_jobs(workspaces: Sequence[Workspace], args: argparse.Namespace) -> list[Job]:
    """Return the jobs of hybrids that keep some softmax layers, as far as these are known."""
    if SEEDS[0] not in args.seeds:
        return []
    keeping = [each for each in workspaces if _keeps_layers(each, args)]
    return [job for each in keeping for job in jobs_for(each, kept_rows(each).values(), args)]


def _keeps_layers(workspace: Workspace, args: argparse.Namespace) -> bool:
    return "kept" in workspace.base.tables and "kept" in args.tables


def jobs_for(
    workspace: Workspace, rows: Iterable[Experiment], args: argparse.Namespace, seed: int = 0
) -> Iterator[Job]:
    """Yield the jobs of one base and seed: training, then what is measured of it."""
    base = workspace.base
    for row in rows:
        if seed not in row.seeds(base) or (args.rows and row.name not in args.rows):
            continue
        measurements = [*commands.measurements(workspace, row, seed)]
        name = f"{base.name} train {row.slot(seed)}"
        after: tuple[str, ...] = ()
        if row.training != "none":
            keys = [workspace.key(measure, row, seed) for measure, _ in measurements]
            keys += [workspace.layers] if "kept" in base.tables and row == RANKED else []
            yield Job(
                name,
                _command(commands.training(workspace, row, seed)),
                _trained(workspace, row, seed, keys),
                _progress(workspace, row, seed),
                weight=1.2 * row.steps,
                after=after,
            )
            after = (name,)
        for measure, words in measurements:
            yield Job(
                f"{base.name} {measure} {row.slot(seed)}",
                _command(words),
                _measured(workspace, workspace.key(measure, row, seed)),
                weight=100.0 if measure == "perplexity" else 50.0,
                after=after,
            )


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, *words[1:]]


def _layers_job(workspace: Workspace) -> Job:
    base, command = workspace.base.name, _command(commands.layers(workspace))
    finished, after = _measured(workspace, workspace.layers), (f"{base} train {RANKED.slot(SEEDS[0])}",)
    return Job(f"{base} layers", command, finished, weight=200.0, after=after)


def _scale_job(workspace: Workspace) -> Job:
    results = workspace.work / "scale" / "results.json"
    command = [sys.executable, str(HERE / "scale.py"), "--output", str(results)]
    return Job("scale", command, _measured(workspace, "scale"), weight=5.0)


def _trained(workspace: Workspace, row: Experiment, seed: int, keys: Sequence[str]) -> Callable[[], bool]:
    """Tell whether a row is trained, or nothing is left to be measured of it."""
    results = workspace.result(row, seed) / "results.json"
    return lambda: results.exists() or all(key in workspace.figures for key in keys)


def _measured(workspace: Workspace, key: str) -> Callable[[], bool]:
    return lambda: key in workspace.figures or measured(workspace.work, key)


def _progress(workspace: Workspace, row: Experiment, seed: int) -> Callable[[], float]:
    folder = workspace.trained(row, seed)
    return lambda: min(sum(map(last_step, folder.glob("**/train.csv"))) / row.steps, 1.0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
