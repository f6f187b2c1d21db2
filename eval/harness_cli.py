"""lm_eval's own command line, with the model type `hf_linattn` added.

python -m hf_linattn.eval.harness_cli --model hf_linattn --model_args pretrained=DIR,patch=elu1 --tasks ...
"""

from __future__ import annotations

import sys

from .harness import run_command


def main() -> int:
    """Hand everything over to lm_eval; the exit status is 0 done, 1 failed, 2 wrong usage."""

    def work() -> None:
        from lm_eval.__main__ import cli_evaluate

        from . import harness_model  # noqa: F401 (registers the model type)

        cli_evaluate()

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
