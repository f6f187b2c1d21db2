"""Measure the package's own share of evaluation, fine-tuning, import and patching.

python studies/end_to_end.py --data $HF_LINATTN_DATA --output docs/performance/end-to-end.md
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_linattn import patch_model
from hf_linattn.data import load_blocks, load_documents
from hf_linattn.eval.bench.timing import Clock, Timed, measure
from hf_linattn.eval.common.markdown import write_between
from hf_linattn.eval.common.windows import encode, plan_windows
from hf_linattn.eval.perplexity.measure import score_length
from hf_linattn.training.loop import LoopSettings, TrainingLoop

MARKS = "<!-- end to end: written by studies/end_to_end.py -->", "<!-- end of end to end -->"
HEAD = "# From end to end: evaluation, fine-tuning, import and patching\n\n"
LENGTHS = (512, 2048, 8192)
TOKENS = 16384
BLOCK, BATCH, STEPS = 512, 8, 6
MODULES = 1000
IMPORT = (
    "import time; begun = time.process_time(); import torch; from transformers import PreTrainedModel; "
    "between = time.process_time(); import hf_linattn; "
    "print(time.process_time() - between, between - begun)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with models/ and text/")
    add("--patch", default="elu1", help="attention beside the model's own (default: %(default)s)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    add("--rounds", type=int, default=5, help="that count (default: %(default)s)")
    add("--output", type=Path, help="the page to write into (default: print)")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    folder, text = args.data / "models/books-1m", args.data / "text/books"
    model = AutoModelForCausalLM.from_pretrained(folder).to(args.device)
    patched = patch_model(copy.deepcopy(model), args.patch)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    clock = Clock(args.device)
    parts = [
        f"`python studies/end_to_end.py --data $HF_LINATTN_DATA`, on `books-1m`; {args.device}, medians of "
        f"{args.rounds} rounds, ratios of {clock.basis}.\n",
        "**Perplexity**, tokens per second over those of a plain loop of `model(ids, labels=ids)` with "
        "torch's fused attention:\n",
        evaluation(model, patched, tokenizer, text / "eval", args, clock),
        f"**Fine-tuning**, {STEPS} steps of {BATCH} x {BLOCK} tokens, steps per second over those of "
        "transformers' `Trainer` on the unpatched model, with what each sets up:\n",
        training(model, patched, tokenizer, text / "train", args, clock),
        f"**Import and patching**, of a processor's time: {importing(args.rounds)}; "
        f"{patching(args.patch, args.rounds)}",
    ]
    content = "\n".join(parts)
    if args.output is None:
        print(content)
    else:
        write_between(args.output, MARKS, content, HEAD)
    return 0


def evaluation(
    model: nn.Module, patched: nn.Module, tokenizer: Any, text: Path, args: argparse.Namespace, clock: Clock
) -> str:
    """The perplexity command's own loop, beside a plain one."""
    documents = [document["text"] for document in load_documents(text)]
    texts, body = encode(tokenizer, documents, bos="no"), []
    for length in LENGTHS:
        plan = plan_windows(texts, [length], stride="full", max_tokens=max(TOKENS, 2 * length))
        windows = plan.windows(length)
        rows = [texts.documents[w.document].ids[None, w.start : w.end].to(args.device) for w in windows]
        timed = [Timed("plain", plain_loop(model, rows))]
        for name, each in (("unpatched", model), (args.patch, patched)):
            timed.append(
                Timed(name, lambda each=each, plan=plan, length=length: score_length(each, plan, length))
            )  # type: ignore[misc]
        found, _ = measure(timed, clock, rounds=args.rounds)
        body.append([f"{length:,}", *(number(found[item.name].speed or 1.0) for item in timed[1:])])
    return table(["tokens", "the command, unpatched", f"the command, `{args.patch}`"], body)


def plain_loop(model: nn.Module, rows: Sequence[torch.Tensor]) -> Callable[[], float]:
    """What one writes by hand."""

    def run() -> float:
        model.eval()
        with torch.no_grad():
            losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in rows]
        return statistics.fmean(losses)

    return run


def training(
    model: nn.Module, patched: nn.Module, tokenizer: Any, text: Path, args: argparse.Namespace, clock: Clock
) -> str:
    """The loop of `finetune` beside transformers' own."""
    blocks = load_blocks(text, tokenizer, BLOCK)[: STEPS * BATCH]
    names = ("unpatched", args.patch)
    with tempfile.TemporaryDirectory() as folder:
        timed = [Timed("Trainer", lambda: trainer(model, blocks, folder, args.device))]
        for name, each in zip(names, (model, patched), strict=True):
            timed.append(Timed(name, lambda each=each: own_loop(each, blocks, args.device)))  # type: ignore[misc]
        found, _ = measure(timed, clock, rounds=args.rounds)
    cells = [number(found[name].speed or 1.0) for name in names]
    return table(["the command, unpatched", f"the command, `{args.patch}`"], [cells])


def trainer(model: nn.Module, blocks: np.ndarray[Any, Any], folder: str, device: str) -> None:
    """The same steps by transformers."""
    from transformers import Trainer, TrainingArguments

    rows = [
        {"input_ids": torch.from_numpy(row).long(), "labels": torch.from_numpy(row).long()} for row in blocks
    ]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()  # type: ignore[arg-type]


def own_loop(model: nn.Module, blocks: np.ndarray[Any, Any], device: str) -> None:
    """The same steps by the package."""
    settings = LoopSettings(STEPS, 1e-6, 1, BATCH, checkpoint_every=10**9, eval_every=10**9)
    with tempfile.TemporaryDirectory() as folder:
        TrainingLoop(Accelerator(cpu=device == "cpu"), model, blocks, settings, Path(folder)).run()


def number(value: float) -> str:
    """Write four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(row)} |" for row in body]
    return "\n".join(lines) + "\n"


def importing(rounds: int) -> str:
    """What importing the package adds, the median over new processes, with the bytecode of the first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    options: dict[str, Any] = {"env": environment, "check": True, "capture_output": True, "text": True}
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, **options).stdout.split() for _ in range(rounds + 1)]
    added = statistics.median(float(seconds) for seconds, _ in runs[1:])
    ratio = statistics.median(float(seconds) / float(before) for seconds, before in runs[1:])
    return (
        f"`import hf_linattn` takes {added:.2f} seconds behind torch and transformers' `PreTrainedModel`, "
        f"{ratio:.3f} times as long as these"
    )


def patching(patch: str, rounds: int) -> str:
    """`patch_model` on many modules."""
    layers = -(-MODULES // 13)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4
    )
    model, seconds = LlamaForCausalLM(config), []
    for _ in range(rounds):
        begun = time.process_time()
        patch_model(model, patch)
        seconds.append(time.process_time() - begun)
    modules = sum(1 for _ in model.modules())
    return f"`patch_model` on a model of {modules:,} modules {statistics.median(seconds):.2f} seconds.\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
