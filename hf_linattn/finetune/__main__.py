"""Fine-tune a model, patched or not, on plain text.

    accelerate launch -m hf_linattn.finetune --model DIR --patch elu1 --data books/ --output-dir out

`hf_linattn.finetune.finetune(FinetuneArguments(...))` is the same from Python.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from typing import Any

from hf_linattn.cli.main import RESUMABLE, exit_status, quiet_libraries, start_missing_processes
from hf_linattn.errors import OptionError
from hf_linattn.finetune import finetune
from hf_linattn.finetune.arguments import FinetuneArguments, build_parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    try:
        arguments = FinetuneArguments(**vars(parser.parse_args(argv)))
    except OptionError as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "hf_linattn.finetune", *argv])
    process = int(os.environ.get("RANK", "0"))

    def work() -> None:
        start_missing_processes("hf_linattn.finetune", argv)
        quiet_libraries(process)
        results = finetune(arguments, command)
        if process == 0:
            sys.stdout.write(_summary(results))

    return exit_status(work, interrupted=RESUMABLE, extra="train", process=process)


def _summary(results: dict[str, Any]) -> str:
    lines = [f"{results['steps']} steps, {results['tokens']:,} tokens, {results['seconds']:.0f} s"]
    if results["eval_loss"] is not None:
        losses = [results["eval_loss_before"], results["eval_loss"]]
        known = [loss for loss in losses if loss is not None]  # the first may have come after training began
        token = "masked token" if results.get("objective") == "mlm" else "token"
        lines.append(
            f"validation loss {' -> '.join(f'{loss:.4f}' for loss in known)} nats per {token} "
            f"(perplexity {' -> '.join(f'{math.exp(loss):.2f}' for loss in known)})"
        )
    if split := results.get("context_parallel"):
        lines.append(
            f"each row was split over {split['processes']} processes; "
            f"a step sent {split['bytes_per_step']:,} bytes between them"
        )
    if results.get("kept_step", results["steps"]) < results["steps"]:  # older runs name none
        lines.append(f"the weights are those of step {results['kept_step']}, the best validation")
    lines.append(f"model, train.csv, loss.png and results.json are in {results['arguments']['output_dir']}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
