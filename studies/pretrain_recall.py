"""Teach a small language model to recall: to find again what it has read, and say what came next.

    python studies/pretrain_recall.py --model DIR --data books/ --output-dir recall     # 1 to 2 hours, CPU
    python studies/pretrain_recall.py --tokenizer DIR --data books/ --output-dir new    # a new model
    python studies/pretrain_recall.py --model DIR --data books/ --output-dir out --steps 30   # a smoke run

A model of a million parameters that is trained on text alone copies nothing: what repeats in books is not
worth an induction head (Olsson et al. 2022, arXiv:2209.11895) to it. Here half of the rows are text as it
comes, which keeps the perplexity. In the others something comes again: random tokens, stretches of text, the
values of a key-value list (`recall_rows.py`). Of these rows only what follows from the tokens before is
learned, so nothing draws the model to guess random tokens.

What makes it fast is the order: rows of 16 tokens first, where the right one among few is soon found, then
twice as many again and again up to --context, all within the first quarter of the steps.

A new model (--tokenizer) learns this much more slowly than one that knows text: train it on text first.

Stopped at any moment, the same command goes on from its last checkpoint. The output folder is a model for
`from_pretrained`; beside it lie training.json (settings and figures), train.csv and loss.png (`eval_loss` is
on text alone), recall.csv and recall.png (share of tokens found again, by kind of row).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from recall_rows import (
    CURRICULUM,
    NARROWEST,
    NO_TARGET,
    TEXT_SHARE,
    TRAINED,
    Ids,
    Rows,
    ordinary_tokens,
    second_copy,
    with_targets,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn.cli.files import filling, replacing, write_json, writing
from hf_linattn.data import load_blocks
from hf_linattn.errors import DataError, LinattnError, OptionError, TrainingError
from hf_linattn.eval.common.models import ModelSpec, load_model, load_tokenizer
from hf_linattn.finetune.run import save_loss_curve
from hf_linattn.training.loop import LoopSettings, TrainingLoop

CHECKPOINT_EVERY = 100
"""Steps between checkpoints and between measurements: what a stop can lose."""
HELD_OUT = 48
"""Blocks that the loss on text is measured on, at most."""
MEASURED = 8
"""Rows of each kind that recall is measured on, the same ones every time."""


def new_model(vocab_size: int) -> LlamaForCausalLM:
    """Make new weights in the shape of examples/base: 6 layers, width 128, 4 heads of 32, tied embeddings."""
    config = LlamaConfig.from_pretrained(Path(__file__).resolve().parent.parent / "examples/base")
    config.vocab_size = vocab_size
    return LlamaForCausalLM(config)


def target_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean negative log-likelihood of each row's known tokens, in nats: [B, 2, N] -> [B]."""
    ids, targets = batch[:, 0], batch[:, 1, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="none")
    return nats.view(targets.shape).sum(1) / (targets != NO_TARGET).sum(1)


@torch.no_grad()
def measure(model: nn.Module, blocks: Ids, ordinary: Ids) -> dict[str, float]:
    """Share of known tokens that are the model's first choice, by kind of row; rows as long as the blocks."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    shares = {}
    for kind in (second_copy, *TRAINED):
        rng = np.random.default_rng([*b"measured"])
        texts = [blocks[i % len(blocks)] for i in range(MEASURED)]
        rows = torch.from_numpy(np.stack([with_targets(kind(rng, text, ordinary)) for text in texts]))
        ids, targets = rows.long().to(device).unbind(1)
        chosen = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        known = targets[:, 1:] != NO_TARGET
        shares[kind.__name__] = float((chosen == targets[:, 1:])[known].double().mean())
    model.train(was_training)
    return shares


class RecallLoop(TrainingLoop):
    """Measures recall whenever it measures the loss; `recall.csv` keeps it over stops."""

    def __init__(self, *args: Any, ordinary: Ids, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ordinary = ordinary
        self.path = self.checkpoint.path.parent.parent / "recall.csv"
        self.curve: list[dict[str, float]] = []
        if self.step and self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [
                    {name: json.loads(cell) for name, cell in row.items()} for row in csv.DictReader(file)
                ]
            # what came after the checkpoint comes again
            self.curve = [row for row in rows if row["step"] <= self.step]

    def _evaluate(self) -> float:
        loss = super()._evaluate()
        assert self.eval_blocks is not None
        tokens = self.step * self.global_batch * self.blocks.shape[1]
        shares = measure(self.bare_model, self.eval_blocks, self.ordinary)
        self.curve.append({"step": self.step, "tokens": tokens, **shares})
        if self.log is not None:
            with replacing(self.path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(self.curve[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.curve)
        return loss


def save_recall_curve(curve: list[dict[str, float]], path: Path, title: str) -> None:
    """Write a PNG with the share of tokens found again over tokens of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in list(curve[0])[2:]:
        points = [(row["tokens"], 100 * row[name]) for row in curve]
        axes.plot(*zip(*points, strict=True), "o-", label=name.replace("_", " "), linewidth=1, markersize=3)
    axes.set(xlabel="tokens", ylabel="found again (% of known tokens)", title=title, ylim=(-2, 102))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model to start from and its tokenizer.

    Raises:
        LinattnError: there is none, or the context does not suit it.
    """
    if bool(args.model) == bool(args.tokenizer):
        raise OptionError("give --model (go on from its weights) or --tokenizer (a new model), one of them")
    tokenizer = load_tokenizer(args.model or args.tokenizer)
    torch.manual_seed(args.seed)
    model: Any = new_model(len(tokenizer))
    if args.model:
        model = load_model(ModelSpec(args.model, args.model), dtype="float32")
    longest = model.config.max_position_embeddings
    if args.context not in [NARROWEST * 2**i for i in range(20)] or args.context > longest:
        raise OptionError(
            f"--context must be {NARROWEST}, {2 * NARROWEST}, {4 * NARROWEST}, ... up to the model's "
            f"{longest} tokens, not {args.context}"
        )
    return model, tokenizer


def load_text(args: argparse.Namespace, tokenizer: Any) -> tuple[Ids, Ids]:
    """Blocks to train on, and others to measure on.

    Raises:
        DataError: there is too little text.
    """
    blocks = load_blocks(args.data, tokenizer, args.context)
    if args.eval_data:
        held = load_blocks(args.eval_data, tokenizer, args.context)
        return blocks, held[:: max(1, len(held) // HELD_OUT)][:HELD_OUT]
    here = np.arange(len(blocks)) % max(2, min(50, len(blocks))) == 1
    if not here.any():
        raise DataError(f"{args.data} is one block of {args.context} tokens: give more text or --eval-data")
    return blocks[~here], blocks[here][:HELD_OUT]


def loop_settings(args: argparse.Namespace) -> LoopSettings:
    """What the training loop is told."""
    for name in ("steps", "batch_size", "lr"):
        if not 0 < getattr(args, name) < math.inf:
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} must be above 0, not {getattr(args, name)}")
    return LoopSettings(
        args.steps,
        args.lr,
        warmup=min(50, args.steps // 10),
        batch_size=args.batch_size,
        seed=args.seed,
        eval_every=CHECKPOINT_EVERY,
        checkpoint_every=CHECKPOINT_EVERY,
    )


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Train, measure, save; returns what training.json holds."""
    folder, settings = Path(args.output_dir), loop_settings(args)
    arguments = {name: value for name, value in vars(args).items() if name not in ("output_dir", "cpu")}
    began = folder / "run.json"
    if not began.exists() and (folder / "config.json").exists():
        raise TrainingError(f"{folder} holds a model of another origin: choose another --output-dir")
    if began.exists() and json.loads(began.read_text(encoding="utf-8")) != arguments:
        raise TrainingError(f"{folder} holds a run with other arguments: choose another --output-dir")
    if (folder / "training.json").exists():
        done: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        return done
    model, tokenizer = load(args)
    blocks, held = load_text(args, tokenizer)
    ordinary = ordinary_tokens(tokenizer)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(began, arguments)
    loop = RecallLoop(
        Accelerator(cpu=args.cpu),
        model,
        blocks,
        settings,
        folder,
        eval_blocks=held,
        losses=target_losses,
        prepare=Rows(ordinary, args.context, args.steps, args.seed).prepare,
        ordinary=ordinary,
    )
    loop.run()
    results = {"command": command, "arguments": arguments, **figures(loop)}
    with filling(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    start = Path(args.model).name if args.model else "a new model"
    assert loop.log is not None
    with replacing(folder / "loss.png") as partial:
        save_loss_curve(loop.log.rows, partial, f"learning to recall, from {start}")
    with replacing(folder / "recall.png") as partial:
        save_recall_curve(loop.curve, partial, f"recall within {args.context} tokens, from {start}")
    write_json(folder / "training.json", results)
    loop.checkpoint.remove()
    return results


def figures(loop: RecallLoop) -> dict[str, Any]:
    """What came out, and of what; losses in nats per token, recall as shares of the known tokens."""
    assert loop.log is not None
    log, curve = loop.log.rows, [dict(list(row.items())[2:]) for row in loop.curve]
    return {
        "parameters": sum(parameter.numel() for parameter in loop.bare_model.parameters()),
        "tokens": int(log[-1]["tokens"]),
        "text_loss_before": float(log[0]["eval_loss"]),
        "text_loss": float(log[-1]["eval_loss"]),
        "recall_before": curve[0],
        "recall": curve[-1],
        "rows": {
            "text": TEXT_SHARE,
            "others": [kind.__name__ for kind in TRAINED],
            "narrowest": NARROWEST,
            "curriculum": CURRICULUM,
        },
        "optimizer": "AdamW, cosine to 10 %",
        "seconds": round(loop.seconds, 1),
        "device": str(loop.accelerator.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 1 failed, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or hub name of a causal language model to start from")
    add("--tokenizer", help="folder of a tokenizer, for a new Llama (1.4 M parameters with 2,048 tokens)")
    add("--data", required=True, help="text to train on, as for hf_linattn.finetune")
    add("--eval-data", help="text to measure on (default: every 50th block of --data, which is left out)")
    add("--output-dir", required=True, help="where everything is written")
    add("--steps", type=int, default=3600, help="updates of the weights (default: %(default)s)")
    add("--batch-size", type=int, default=4, help="blocks of text per step (default: %(default)s)")
    add("--context", type=int, default=512, help="tokens per row in the end (default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all random choices (default: %(default)s)")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    args = parser.parse_args(argv)
    try:
        results = run(args, shlex.join(["python", "studies/pretrain_recall.py", *argv]))
    except LinattnError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command continues from the last checkpoint\n")
        return 130
    print(f"loss on text {results['text_loss_before']:.3f} -> {results['text_loss']:.3f} nats per token")
    for name, share in results["recall"].items():
        print(f"{name:15} {results['recall_before'][name]:7.1%} -> {share:7.1%}")
    print(f"{results['seconds']:.0f} s of training; the model and training.json are in {args.output_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
