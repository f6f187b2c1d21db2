"""Check and measure hf_linattn on a GPU: one command for a bare machine, without a network.

    python gpu_check.py correct patches kernels models length train --output-dir OUT

Every stage runs in a process of its own and ends within --minutes. What it found stands in OUT/STAGE.jsonl,
a line per case, as soon as it is known; a case that fails is a line that says why. The same command goes on
where it stopped. This page needs only Python, so that what is missing gets a clear answer.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAGES = ("correct", "patches", "kernels", "models", "length", "train")
WHAT = """\
stages:
  correct   every kernel, dtype and size against float64, and the same bits twice
  patches   a small Llama with every patch against the same model in float64: padding, backward, decode
  kernels   ours, torch operations, softmax and fla: forward, backward, decode; then candidates of tiles,
            whose best are written to OUT/tiles.json
  models    random Llamas of 135 M and 1 B: prefill, decode and a training step at 1k, 8k and 32k tokens
  length    perplexity of books-1m up to a million tokens, kernels against torch operations
  train     the loss of a fine-tuning in bfloat16, with kernels and without
  all       these, in this order

To use the tiles that were measured, copy OUT/tiles.json to $XDG_CACHE_HOME/hf_linattn or ~/.cache/hf_linattn.
The exit status is 0 where every case is done and none failed, 1 else, 2 for wrong usage, 130 after Ctrl-C.
"""
FORMAT = "hf_linattn.gpu_check/1"
UNFINISHED, RESTART = 3, 4
"""Exit status of a stage's process: cases are left; the device must be opened anew."""


class Refused(Exception):
    """Raised with one line for the user."""


class Terminated(KeyboardInterrupt):
    """Raised where this process alone was told to end."""


def build_parser():
    """Make the command's parser."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description="Check and measure the attention of hf_linattn on this machine's GPU.",
        epilog=WHAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="of " + ", ".join(STAGES) + ", all")
    add(
        "--output-dir",
        type=Path,
        required=True,
        help="folder for the results; the same command resumes there",
    )
    add(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, to see that all stages run; no figures"
    )
    add("--minutes", type=float, default=9.0, help="that one stage may take (default: %(default)g)")
    add("--only", action="append", metavar="WORDS", help="cases that have these words, such as h2o; may be "
        "given several times")  # fmt: skip
    add("--retry", action="store_true", help="do failed cases again")
    add("--docs", type=Path, metavar="PAGE", help="write what OUT holds into this page, between its markers; "
        "alone, nothing is measured")  # fmt: skip
    add("--here", type=Path, help=argparse.SUPPRESS)  # this is the process of one stage; notes what it is at
    return parser


def main(argv=None):
    """Run the command; return the exit status."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)  # the process of a stage must not outlive this one
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        args.stages = chosen(args.stages)
    except Refused as error:
        parser.error(str(error))
    if not args.stages and not args.docs:
        parser.error("name a stage: " + ", ".join(STAGES) + ", or all")
    if args.minutes <= 0:
        parser.error("--minutes must be above 0")
    try:
        if args.here:
            from gpu_stages import work

            return work.stage(args)
        return whole(args)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted; rows that were written stay, the same command goes on after them", file=sys.stderr
        )
        return 130


def terminated(*_):
    """End as after Ctrl-C.

    Raises:
        Terminated: always.
    """
    raise Terminated


def chosen(names):
    """Check names of stages; return each once, in the order in which they are done."""
    for name in names:
        if name not in (*STAGES, "all"):
            raise Refused(f"there is no stage {name!r}; stages are {', '.join(STAGES)}, all")
    return [name for name in STAGES if name in names or "all" in names]


def whole(args):
    """Do all stages, each in a process of its own, and write the page."""
    before = [*(unpacked(HERE / "wheels") if args.stages else []), str(HERE)]
    sys.path[:0] = before
    os.environ["PYTHONPATH"] = os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH")])])
    status = 0
    if args.stages:
        begin(args.output_dir, about(args.dry_run))
    for stage in args.stages:
        status = max(status, supervised(stage, args))
    if args.docs:
        from gpu_stages import page

        page.write(args.docs, args.output_dir)
        print(f"{args.docs} written")
    return status


def unpacked(wheels, into=None):
    """Install those wheels of the kit that this Python lacks; return folders for the search path.

    Raises:
        Refused: pip cannot install them.
    """
    if not wheels.is_dir():
        return []  # not a kit: the package that is installed is checked
    own, lacking = [], []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = None
        if name == "hf_linattn":
            own.append(wheel)  # the one under test, whatever is installed
        elif here is None:
            lacking.append(wheel)
    if not own:
        raise Refused(
            f"{wheels} holds no wheel of hf_linattn: the kit is damaged, build it again with make gpu-kit"
        )
    into = into or Path(tempfile.gettempdir()) / f"hf_linattn-kit-{os.getuid()}"
    stamp, wanted = into / ".installed", "\n".join(f"{x.name} {x.stat().st_size}" for x in own + lacking)
    if not stamp.exists() or stamp.read_text() != wanted:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(into)]
        done = subprocess.run(
            [*command, *map(str, own + lacking)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Refused(
                f"the kit's wheels cannot be installed into {into}: {(done.stdout + done.stderr)[-600:]}"
            )
        stamp.write_text(wanted)
    return [str(into)]


def about(dry_run):
    """Say what is measured and where; rows of another device or of other kernels are another run.

    Raises:
        Refused: no CUDA device, or a package is missing.
    """
    try:
        import torch
        import transformers

        import hf_linattn.ops  # noqa: F401  raises where the package does not suit
    except ImportError as error:
        raise Refused(
            f"{error}: this machine's Python needs torch and transformers ({sys.executable})"
        ) from error
    if not dry_run and not torch.cuda.is_available():
        why = (
            "was built without CUDA"
            if torch.version.cuda is None and torch.version.hip is None
            else "sees none"
        )
        raise Refused(
            f"no CUDA device: torch {torch.__version__} {why}. --dry-run tries all stages on the CPU"
        )
    found = {"format": FORMAT, "dry_run": dry_run, "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "hf_linattn": metadata.version("hf_linattn")}
    found["device"] = "cpu" if dry_run else torch.cuda.get_device_name(0)
    try:
        import triton

        from hf_linattn.ops.triton import measured_tiles

        found |= {"triton": triton.__version__, "kernels": measured_tiles.fingerprint()}
    except ImportError as error:
        if not dry_run:
            raise Refused(f"triton cannot be imported ({error}): pip install triton") from error
        found |= {"triton": None, "kernels": None}
    return found


def begin(folder, found):
    """Make the folder of the results, or find that it is of this very run.

    Raises:
        Refused: it holds another run or other files, or cannot be written.
    """
    path = folder / "run.json"
    other = "choose another --output-dir"
    try:
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier.get("format") != FORMAT:
                raise Refused(f"{path} is of another program or version: {other}")
            differ = [
                f"{key} was {earlier.get(key)}, is {found[key]}"
                for key in found
                if earlier.get(key) != found[key]
            ]
            if differ:
                raise Refused(f"{folder} holds another run ({'; '.join(differ)}): {other}")
            return
        if folder.exists() and any(folder.iterdir()):
            raise Refused(f"{folder} is not empty and holds no run of gpu_check.py: {other}")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(f"{folder} cannot be used ({type(error).__name__}: {error}): {other}") from error


def supervised(stage, args, command=None):
    """Run a stage in a process of its own; return 0 where all its cases are done and none failed.

    A process that dies or hangs leaves a row on the case that it was at, and another goes on behind it.
    """
    end = time.monotonic() + 60 * args.minutes
    rows = args.output_dir / f"{stage}.jsonl"
    retry = args.retry
    while True:
        left = end - time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            now = Path(folder, "now.json")
            words = command or [sys.executable, str(Path(__file__).resolve())]
            words = [
                *words,
                stage,
                "--output-dir",
                str(args.output_dir),
                "--minutes",
                f"{max(left, 1) / 60:.3f}",
            ]
            words += [
                "--here",
                str(now),
                *(["--dry-run"] if args.dry_run else []),
                *(["--retry"] if retry else []),
                *(word for words in args.only or () for word in ("--only", words)),
            ]
            child = subprocess.Popen(words)
            try:
                status = child.wait(timeout=max(left, 1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                status = None
            except KeyboardInterrupt as error:
                if isinstance(error, Terminated):
                    child.terminate()
                try:  # after Ctrl-C it got the signal too, and ends by itself
                    child.wait(timeout=10)
                except (subprocess.TimeoutExpired, KeyboardInterrupt):
                    child.kill()
                raise
            at = json.loads(now.read_text()) if now.exists() else None
        if status in (0, UNFINISHED):
            break
        if status == 130:
            raise KeyboardInterrupt
        retry = False  # once is enough
        if status != RESTART:
            if at is None:
                why = f"its process ended with status {status} before the first case; its messages are above"
                at = {"case": {"case": "start"}, "began": time.time()}
                if status is None:
                    why = "no case was begun in time"
                append(rows, {"case": at["case"], "ok": False, "error": why})
                break
            seconds = time.time() - at["began"]
            if status is not None:
                why = f"its process ended with status {status}" + (" (a signal)" if status < 0 else "")
                append(rows, {"case": at["case"], "ok": False, "error": why, "seconds": seconds})
            elif seconds > 30 * args.minutes:  # it had half of the time for itself
                why = f"it took more than {seconds:.0f} s and was ended"
                append(rows, {"case": at["case"], "ok": False, "error": why, "seconds": seconds})
        if status is None or end - time.monotonic() < 5:
            status = UNFINISHED
            break
    return said(stage, rows, status)


def append(path, row):
    """Write a row, on a line of its own even where an earlier process died within one."""
    broken = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if broken else "") + json.dumps(row, default=str) + "\n")


def read(path):
    """Read the rows of a stage, the last of each case; what a dying process left unfinished is skipped."""
    found = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                found[json.dumps(row["case"], sort_keys=True)] = row
            except (ValueError, KeyError, TypeError):
                continue
    return found


def said(stage, path, status):
    """Print how a stage ended; return its part of the exit status."""
    rows = list(read(path).values())
    failed = [row for row in rows if not row["ok"]]
    left = "; not all cases are done: the same command goes on" if status == UNFINISHED else ""
    print(f"{stage}: {len(rows)} cases, {len(failed)} failed{left} ({path})", flush=True)
    for row in failed[:5]:
        print(f"  {json.dumps(row['case'])}: {row.get('error', '')[:300]}", flush=True)
    return int(bool(failed) or status != 0)


if __name__ == "__main__":
    sys.exit(main())
