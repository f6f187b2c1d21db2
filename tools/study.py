"""Write docs/results.md: what conversion keeps, against a control trained on the same tokens.

python tools/study.py --data $HF_LINATTN_DATA --work-dir W --output docs/results.md
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from study_bases import BASES
from study_commands import (
    branches_words,
    diagnose_words,
    generation_words,
    perplexity_words,
    recall_words,
    training_words,
)
from study_figures import collect, load, measured, write
from study_kept import TRANSFERRED, kept_rows, layers_words
from study_page import page, write_page
from study_place import Place, slot
from study_plan import DIAGNOSED, TABLES, rows_of
from study_row import SEEDS, Row, last_stage, steps_of
from study_texts import prepare

from hf_linattn.errors import LinattnError
from hf_linattn.jobs import Job, last_step, run_jobs

EPILOG = """\
examples (`study` stands for `python tools/study.py --data $HF_LINATTN_DATA --work-dir W`):
  study --output docs/results.md          # everything that is missing, then the page: a day on two cores
  study --base books --tables lengths --seeds 0 --output docs/results.md
  study --base books --rows control hedgehog --seeds 0 1 2
  study --list                            # the commands, and which are done
  study --no-run --output docs/results.md # the page alone, with what there is

The base `recall` is what examples/pretrain_recall.py leaves, as W/recall-base. Every figure is made by a
command of the package, each its own process with a log in W/logs. Killed at any moment, the same command goes
on; what is measured is not measured again, nor what stands beside the page (docs/results.json for
docs/results.md), which is enough to go on without the work folder.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
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
    """Run the tool; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        work = args.work_dir.resolve()
        kept = args.output.with_suffix(".json") if args.output else None
        figures = collect(load(kept) if kept else {}, work)
        places = [Place(BASES[name], args.data, work, figures) for name in args.base]
        known = {row.name for rows in TABLES.values() for row in rows}
        known |= {name for place in places for name in kept_rows(place)}
        if unknown := set(args.rows or ()) - known:
            parser.error(f"no row is called {', '.join(sorted(unknown))}")
        jobs = all_jobs(places, args)
        if args.list:
            for job in [*jobs, *kept_jobs(places, args)]:
                print(f"{'done' if job.finished() else 'open'}  {shlex.join(job.command[1:])}")
            return 0
        if not args.no_run:
            for place in places:
                prepare(place)
            environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            run_jobs(jobs, work / "logs", args.jobs, environment)
            collect(figures, work)
            run_jobs(kept_jobs(places, args), work / "logs", args.jobs, environment)
            collect(figures, work)
        if kept:
            write(kept, figures)
            write_page(args.output, page(args.data, work, figures))
    except LinattnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def all_jobs(places: Sequence[Place], args: argparse.Namespace) -> list[Job]:
    """Everything but the hybrids that keep some softmax layers: these are known when layers are ranked."""
    jobs = [
        job
        for seed in args.seeds
        for place in places
        for job in jobs_for(place, rows_of(place.base, args.tables), args, seed)
    ]
    if _whole(args):
        ranked = [place for place in places if "kept" in place.base.tables and "kept" in args.tables]
        jobs += [_layers_job(place) for place in ranked]
        jobs.append(_scale_job(places[0]))
    return jobs


def kept_jobs(places: Sequence[Place], args: argparse.Namespace) -> list[Job]:
    """Those of the hybrids that keep some softmax layers, as far as these are known."""
    if "kept" not in args.tables or SEEDS[0] not in args.seeds:
        return []
    asked = [place for place in places if "kept" in place.base.tables]
    return [job for place in asked for job in jobs_for(place, kept_rows(place).values(), args)]


def _whole(args: argparse.Namespace) -> bool:
    """Whether neither rows nor seeds were chosen that would leave out what other jobs wait for."""
    return not args.rows and SEEDS[0] in args.seeds


def jobs_for(place: Place, rows: Iterable[Row], args: argparse.Namespace, seed: int = 0) -> Iterator[Job]:
    """The jobs of one base and seed: training, then what is measured of it."""
    for row in rows:
        if seed not in row.seeds(place.base) or (args.rows and row.name not in args.rows):
            continue
        commands = [*measurements(place, row, seed)]
        trained: tuple[str, ...] = ()
        if row.how != "none":
            keys = [place.key(what, row, seed) for what, _ in commands]
            keys += [place.layers] if place.base.recalls and row == TRANSFERRED else []
            words, finished = training_words(place, row, seed), _trained(place, row, seed, keys)
            training = _job("train", place, row, seed, words, finished)
            trained = (training.name,)
            yield training
        for what, words in commands:
            finished = _measured(place, place.key(what, row, seed))
            yield _job(what, place, row, seed, words, finished, trained)


def measurements(place: Place, row: Row, seed: int) -> Iterator[tuple[str, list[str]]]:
    """What is measured of a row, and by which command."""
    yield "perplexity", perplexity_words(place, row, seed)
    if seed == SEEDS[0] and row.how != "none" and place.base.name != "scratch":
        yield "generation", generation_words(place, row, seed)
    if place.base.recalls and row.name != "original":
        yield "recall", recall_words(place, row, seed)
    if place.base.name in ("books", "scratch") and row.name in DIAGNOSED:
        yield "diagnose", diagnose_words(place, row, seed)
    if isinstance(row.patch, str) and row.patch.startswith("window+"):
        yield "branches", branches_words(place, row, seed)


def _job(
    what: str,
    place: Place,
    row: Row,
    seed: int,
    words: list[str],
    finished: Callable[[], bool],
    after: tuple[str, ...] = (),
) -> Job:
    name = f"{place.base.name} {what} {slot(row, seed)}"
    weight = {"train": 1.2 * steps_of(row), "perplexity": 100.0}.get(what, 50.0)
    progress = _progress(place, row, seed) if what == "train" else lambda: 0.0
    return Job(name, [sys.executable, *words[1:]], finished, progress, weight, after)


def _layers_job(place: Place) -> Job:
    words, finished = layers_words(place), _measured(place, place.layers)
    command = [sys.executable, *words[1:]]
    after = (f"{place.base.name} train {slot(TRANSFERRED, 0)}",)
    return Job(f"{place.base.name} layers", command, finished, weight=200.0, after=after)


def _scale_job(place: Place) -> Job:
    results = place.work / "scale" / "results.json"
    command = [sys.executable, str(Path(__file__).with_name("study_scale.py")), "--output", str(results)]
    return Job("scale", command, _measured(place, "scale"), weight=5.0)


def _trained(place: Place, row: Row, seed: int, keys: Sequence[str]) -> Callable[[], bool]:
    """Whether a row is trained, or nothing is left to be measured of it."""
    stage = last_stage(row) if row.how == "convert" else ""
    results = place.trained(row, seed) / stage / "results.json"
    return lambda: results.exists() or all(key in place.figures for key in keys)


def _measured(place: Place, key: str) -> Callable[[], bool]:
    return lambda: key in place.figures or measured(place.work, key)


def _progress(place: Place, row: Row, seed: int) -> Callable[[], float]:
    folder = place.trained(row, seed)
    return lambda: min(sum(map(last_step, folder.glob("**/train.csv"))) / steps_of(row), 1.0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
