"""The former name of `python -m hf_linattn.eval.perplexity --branches`; it goes with the next release."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .perplexity import compare_branches
from .perplexity.__main__ import main as perplexity_main

__all__ = ["compare_branches", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run perplexity with --branches, and say that this is the way to call it."""
    argv = sys.argv[1:] if argv is None else argv
    sys.stderr.write("note: this command is now python -m hf_linattn.eval.perplexity --branches ...\n")
    words = argv if any(word.startswith("--branches") for word in argv) else [*argv, "--branches"]
    return perplexity_main(words)


if __name__ == "__main__":
    sys.exit(main())
