"""Convert a pretrained model to another attention, in stages that keep what it knows.

    python -m hf_linattn.convert --model DIR --data books/ --output-dir out

`hf_linattn.convert.convert(model, data, output_dir=...)` is the same from Python.
"""

from __future__ import annotations

import os
import shlex
import sys

from hf_linattn.cli.main import RESUMABLE, exit_status, quiet_libraries, start_missing_processes
from hf_linattn.convert.arguments import ConvertArguments, build_parser
from hf_linattn.errors import OptionError


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    try:
        arguments = ConvertArguments(**vars(parser.parse_args(argv)))
    except OptionError as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "hf_linattn.convert", *argv])
    process = int(os.environ.get("RANK", "0"))

    def work() -> None:
        start_missing_processes("hf_linattn.convert", argv)
        quiet_libraries(process)
        # Imported here so that --help and a wrong option answer without loading accelerate and datasets.
        from hf_linattn.convert.outputs import summary
        from hf_linattn.convert.run import run

        result = run(arguments, command)
        if process == 0:
            sys.stdout.write(summary(result))

    return exit_status(work, interrupted=RESUMABLE, extra="train", process=process)


if __name__ == "__main__":
    raise SystemExit(main())
