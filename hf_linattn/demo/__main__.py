"""Tell the whole story in one command: patch a model, fine-tune it, measure it, see a page.

python -m hf_linattn.demo --output-dir demo-out
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any

from hf_linattn.cli.arguments import argparse_type, json_object, positive_int, positive_ints
from hf_linattn.cli.main import exit_status
from hf_linattn.errors import DataError, OptionError

BASE = Path(__file__).resolve().parent.parent.parent / "examples" / "base"
"""The model that comes with the repository."""

# The default takes under 5 minutes on 2 cores; of its time half is training, half measuring.
PATCHES = "hybrid,elu1,softmax1,logn"
MAX_STEPS = 50
BATCH_SIZE = 8
LR = 1e-3
EVAL_TOKENS = 3072
NEW_TOKENS = 100
MULTIPLES = (1, 2, 4, 8, 16)

EPILOG = """\
examples:
  make demo                                             # the model and text that come with the repository
  make demo MODEL=Qwen/Qwen3-0.6B DATA=books/ PATCH=elu1,softmax1 OUT=qwen-out
  python -m hf_linattn.demo --model DIR --data train.txt --eval-data book.txt --patch logn \\
      --options '{"train_length": 2048}' --block-size 2048 --max-steps 200 --output-dir out

runs:
  unpatched  the model as it is, not fine-tuned
  control    the model with its own attention, fine-tuned
  hybrid     window+gated, made of the model by hf_linattn.convert with as many tokens of the same text
  PATCH      each other patch: installed, then fine-tuned on the same batches as the control

The folder gets data/, runs/NAME/ (models), perplexity/NAME/, samples.json, results.json, results.csv,
commands.json, logs/ and report.html. Interrupted at any moment, the same command goes on where it stopped.
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.demo",
        description="Patch, fine-tune and measure a model and its control, and write one page about it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, positive_int
    add("--output-dir", type=Path, default=Path("demo-out"), help="(default: %(default)s)")
    add("--model", help="folder or Hub name of a causal language model (default: the one in examples/base)")
    add("--data", help="text to train on: file, folder, table or dataset name (default: Python's own source)")
    add("--eval-data", help="text to measure on (default: the end of --data, which is then not trained on)")
    add("--patch", default=PATCHES, help="patches, or hybrid, separated by commas (default: %(default)s)")
    options_help = "options of the patches as JSON: given to every patch that has them, or {PATCH: {...}}"
    add("--options", type=argparse_type(_options), default={}, metavar="JSON", help=options_help)
    add("--max-steps", type=count, default=MAX_STEPS, help="updates of each run (default: %(default)s)")
    add("--batch-size", type=count, default=BATCH_SIZE, help="rows per update (default: %(default)s)")
    add("--lr", type=float, default=LR, help="peak learning rate (default: %(default)s)")
    block_help = "tokens per row (default: 512, or what the model was trained on if less)"
    add("--block-size", type=count, help=block_help)
    add(
        "--lengths",
        type=positive_ints,
        help="tokens of context to measure at (default: 1 to 16 times --block-size)",
    )
    tokens_help = "tokens scored at each length (default: %(default)s)"
    add("--eval-tokens", type=count, default=EVAL_TOKENS, help=tokens_help)
    add("--new-tokens", type=count, default=NEW_TOKENS, help="tokens per sample (default: %(default)s)")
    add(
        "--jobs",
        type=count,
        default=2,
        help="processes side by side (default: %(default)s; 1 on a GPU)",
    )
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    args = build_parser().parse_args(argv)
    started = time.monotonic()

    def work() -> None:
        from hf_linattn.demo.folder import summary

        page = run(args)
        sys.stdout.write(summary(page, f"{time.monotonic() - started:.0f} s"))

    return exit_status(work, interrupted="the same command goes on where it stopped", extra="all")


def run(args: argparse.Namespace) -> Path:
    """Do everything that is not done yet; return the page.

    Raises:
        LinattnError: an argument cannot be used, the folder holds another demo, or a job failed.
    """
    # imported here so that --help and wrong usage answer at once
    from hf_linattn.cli.files import write_json
    from hf_linattn.cli.jobs import run_jobs
    from hf_linattn.demo.data import prepare
    from hf_linattn.demo.folder import claim, cores, device, fingerprint
    from hf_linattn.demo.jobs import Plan, make_jobs

    if args.model is None and not (BASE / "config.json").exists():
        raise DataError(f"no model in {BASE}, which comes with the repository only: give one with --model")
    model = args.model or (
        str(BASE.relative_to(Path.cwd())) if BASE.is_relative_to(Path.cwd()) else str(BASE)
    )
    patches = _patches(args.patch, args.options)
    tokenizer, limit = _inspect(model)
    block_size = args.block_size or min(512, limit or 512)
    settings = {
        "model": model,
        "model_fingerprint": fingerprint(Path(model)),
        "data": args.data,
        "eval_data": args.eval_data,
        "patches": patches,
        "block_size": block_size,
        "lengths": args.lengths or [block_size * factor for factor in MULTIPLES],
        **{name: getattr(args, name) for name in ("max_steps", "batch_size", "lr", "eval_tokens")},
        **{name: getattr(args, name) for name in ("new_tokens", "seed", "cpu")},
        "version": importlib.metadata.version("hf-linattn"),
    }
    claim(args.output_dir, settings)
    data = prepare(
        args.output_dir / "data",
        tokenizer,
        data=args.data,
        eval_data=args.eval_data,
        train_tokens=args.max_steps * args.batch_size * block_size,
        block_size=block_size,
        lengths=settings["lengths"],
    )
    for note in data.notes:
        sys.stderr.write(note + "\n")
    on_cpu = device(args.cpu) == "cpu"
    plan = Plan(args.output_dir, model, patches, data, block_size, on_cpu, settings)
    jobs, commands = make_jobs(plan)
    write_json(args.output_dir / "commands.json", commands)
    at_once = args.jobs if on_cpu else 1
    # a model as small as ours gains nothing from more threads
    threads = 1 if args.model is None else max(1, cores() // at_once)
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    run_jobs(jobs, args.output_dir / "logs", at_once, environment)
    return Path(args.output_dir) / "report.html"


def _patches(text: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every patch with its options, all checked.

    Raises:
        LinattnError: a patch or an option is unknown, or a patch is named twice.
    """
    from hf_linattn.demo import hybrid
    from hf_linattn.registry import find, parse, signature

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise OptionError(f"--patch takes names of patches, each once, separated by commas: got {text!r}")
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    patches = {name: hybrid.PATCH if name == hybrid.NAME else name for name in names}
    for key, value in options.items():
        takers = [
            name
            for name, patch in patches.items()
            if any(key in signature(find(part)) for part in patch.split("+"))
        ]
        if key in chosen and isinstance(value, dict):
            chosen[key].update(value)
        elif takers:
            for name in takers:
                chosen[name][key] = value
        else:
            raise OptionError(f"--options: none of {', '.join(names)} has an option {key!r}")
    for name, values in chosen.items():
        parse(patches[name], {**hybrid.OPTIONS, **values} if name == hybrid.NAME else values)
    return chosen


def _inspect(model: str) -> tuple[Any, int | None]:
    """Return the tokenizer, and the tokens of context that the model was trained on.

    Raises:
        CheckpointError: there is no model.
        DataError: there is no tokenizer.
    """
    from hf_linattn.patching.loading import load_config, load_tokenizer

    config = load_config(model).get_text_config()
    return load_tokenizer(model), getattr(config, "max_position_embeddings", None)


def _options(text: str) -> dict[str, Any]:
    return json_object(text or "{}")  # `make demo` passes an empty text where none are named


if __name__ == "__main__":
    sys.exit(main())
