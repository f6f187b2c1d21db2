"""Write docs/patches/: what every registered patch computes, and what it does to a small model.

python -m tools.catalogue --model DIR --data DIR --work-dir W --output docs/patches
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linattn.cli.jobs import run_jobs
from hf_linattn.errors import LinattnError
from hf_linattn.registry import REFUSED, patches

from .docstrings import read_all
from .measure import TEXTS, forget, jobs_for, measure, prepare_texts
from .pages import pages
from .plan import (
    CONTROL,
    ORIGINAL,
    Settings,
    Subject,
    compositions,
    key_of,
    load_result,
    load_results,
    subjects,
)

EPILOG = f"""\
examples (`catalogue` stands for `python -m tools.catalogue --model DIR --data DIR --work-dir W`):
  catalogue --output docs/patches               # measure what is missing or changed, then write the pages
  catalogue --list                              # what is measured and what is not
  catalogue --only elu1 softmax1+logn --again   # these once more; the others keep their results
  catalogue --no-measure --output docs/patches  # the pages alone, from the results that there are

The data folder holds {TEXTS["train"]} and {TEXTS["held_out"]}: stories, each beginning "Once upon a time".
A measurement counts until the options, the settings or the code of the patch's own file change; after changes
of the core use --again. A killed run continues with the same command. A patch that fails does not stop the
others: its page says so, the exit status is 1, and the next run tries it again.
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        description="Write the catalogue of patches, with measurements of every patch on one small model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of the causal language model to patch")
    add("--data", type=Path, required=True, help="folder with the texts (see below)")
    add("--work-dir", type=Path, required=True, help="folder for models and results; resumes there")
    add("--output", type=Path, help="folder for the pages (default: none are written)")
    add(
        "--jobs",
        type=int,
        default=2,
        help="patches side by side, a thread each (default: %(default)s)",
    )
    add("--only", nargs="+", metavar="NAME", help="measure only these patches or compositions")
    add("--again", action="store_true", help="measure even what is measured already")
    add("--no-measure", action="store_true", help="measure nothing")
    add("--list", action="store_true", help="say what is measured, and stop")
    add("--measure", metavar="NAME", help="measure this one in this process: what the jobs do")
    for item in dataclasses.fields(Settings):
        flag, kind = "--" + item.name.replace("_", "-"), type(item.default)
        add(flag, type=kind, default=item.default, help=f"{item.metadata['help']} (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    settings = Settings(**{item.name: getattr(args, item.name) for item in dataclasses.fields(Settings)})
    try:
        known = subjects()
    except LinattnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if unknown := [name for name in [*(args.only or []), *filter(None, [args.measure])] if name not in known]:
        parser.error(f"nothing to measure is called {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        if args.measure:
            measure(known[args.measure], settings, args.model, str(args.data), args.work_dir)
            return 0
        if args.list:
            print(listing(args, settings))
            return 0
        return catalogue(args, settings)
    except LinattnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        return 130


def catalogue(args: argparse.Namespace, settings: Settings) -> int:
    """Measure, write the pages, and print what failed; return 1 if something did."""
    entries = read_all()
    wanted = [s for s in subjects().values() if not args.only or s.name in (ORIGINAL, CONTROL, *args.only)]
    if not args.no_measure:
        _measure(args, settings, wanted)
    results = load_results(args.work_dir, settings, args.model, str(args.data))
    if args.output:
        model, data = _display_path(args.model), _display_path(str(args.data))
        args.output.mkdir(parents=True, exist_ok=True)
        for name, text in pages(entries, compositions(), REFUSED, results, settings, model, data).items():
            (args.output / name).write_text(text, encoding="utf-8")
        print(f"{args.output}: {len(entries)} patches, {len(compositions())} compositions")
    failed = {name: result["error"] for name, result in results.items() if "error" in result}
    for name, error in failed.items():
        print(f"{name} failed: {error}", file=sys.stderr)
    return 1 if failed else 0


def _measure(args: argparse.Namespace, settings: Settings, wanted: Sequence[Subject]) -> None:
    prepare_texts(args.data, args.work_dir)
    for subject in wanted:
        key = key_of(subject, settings, args.model, str(args.data))
        again = args.again and (not args.only or subject.name in args.only)
        forget(args.work_dir, subject, key, again)
    words = ["-m", "tools.catalogue", "--model", args.model, "--data", str(args.data)]
    words += ["--work-dir", str(args.work_dir)]
    for name, value in dataclasses.asdict(settings).items():
        words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    jobs = jobs_for(wanted, settings, args.work_dir, words)
    root = str(Path(__file__).resolve().parents[2])
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": root}
    run_jobs(jobs, args.work_dir / "logs", args.jobs, environment)


def listing(args: argparse.Namespace, settings: Settings) -> str:
    """List every patch and composition: measured, changed since, failed, not measured, or why never."""
    lines = []
    for name, subject in subjects().items():
        result = load_result(args.work_dir, name)
        if result is None:
            state = "not measured"
        elif result["key"] != key_of(subject, settings, args.model, str(args.data)):
            state = "changed since it was measured"
        else:
            state = f"failed: {result['error']}" if "error" in result else "measured"
        lines.append(f"{name}: {state}")
    lines += [f"{n}: bidirectional only" for n, c in patches().items() if c.directions == "bidirectional"]
    return "\n".join(lines)


def _display_path(path: str) -> str:
    """Return a path as the pages write it: below $HF_LINATTN_DATA, or its last part alone."""
    root = os.environ.get("HF_LINATTN_DATA")
    if root and Path(path).resolve().is_relative_to(Path(root).resolve()):
        return f"$HF_LINATTN_DATA/{Path(path).resolve().relative_to(Path(root).resolve()).as_posix()}"
    return Path(path).name


if __name__ == "__main__":
    sys.exit(main())
