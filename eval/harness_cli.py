"""lm_eval's own command line, with the model type `hf_linattn` added.

python -m hf_linattn.eval.harness_cli --model hf_linattn --model_args pretrained=DIR,patch=elu1 --tasks ...
"""

from __future__ import annotations

import os
import sys

from hf_linattn.cli.main import exit_status


def main() -> int:
    """Hand everything over to lm_eval; the exit status is as for every command."""

    def work() -> None:
        from lm_eval.__main__ import cli_evaluate

        from .harness import model as harness_model  # noqa: F401 (registers the model type)

        cli_evaluate()

    process = int(os.environ.get("RANK", "0"))
    return exit_status(work, interrupted="nothing was written", extra="harness", process=process, alike=True)


if __name__ == "__main__":
    sys.exit(main())
