"""The former name of `python -m hf_linattn.eval.generation --prompt`; it goes with the next release."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .generation.__main__ import main as generation_main

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run generation with the same words, and say that this is the way to call it."""
    sys.stderr.write("note: this command is now python -m hf_linattn.eval.generation --prompt ...\n")
    return generation_main(argv)


if __name__ == "__main__":
    sys.exit(main())
