"""The former name of `python -m hf_linattn.bench --cost`; it goes with the next release."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .bench.__main__ import main as bench_main

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run bench --cost with the same words, and say that this is the way to call it."""
    sys.stderr.write("note: this command is now python -m hf_linattn.bench --cost ...\n")
    return bench_main(["--cost", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
