"""Pretrain the small base model of the demo on the Python standard library's source text.

    python examples/pretrain_base.py --output-dir base            # about 100 minutes on one core
    python examples/pretrain_base.py --output-dir base --steps 20 # a smoke run

A Llama of 1.4 M parameters, context 512, with a byte-level BPE tokenizer of its own. Muon trains the hidden
matrices, AdamW the rest. Stop it at any moment and start the same command again: it continues from its
last checkpoint. The files in `hf_linattn.demo.stdlib_text.HELD_OUT` are never read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_linattn.demo.stdlib_text import HELD_OUT, stdlib_files

END = "<|endoftext|>"
CONTEXT = 512


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE without normalisation: decoding gives the very bytes back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model(vocab_size: int) -> LlamaForCausalLM:
    """Make a Llama of 6 layers, width 128, 4 heads of 32, tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


def batch_at(step: int, tokens: np.ndarray, batch_size: int, seed: int) -> torch.Tensor:
    """Return the token ids of a step, [batch_size, CONTEXT]: disjoint windows, in a new order each epoch."""
    rows = len(tokens) // CONTEXT - 1
    per_epoch = rows // batch_size
    epoch, index = divmod(step, per_epoch)
    generator = np.random.default_rng((seed, epoch))
    offset = int(generator.integers(CONTEXT))
    order = generator.permutation(rows)[index * batch_size : (index + 1) * batch_size]
    return torch.from_numpy(
        np.stack([tokens[offset + r * CONTEXT : offset + (r + 1) * CONTEXT] for r in order]).astype(np.int64)
    )


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon on the matrices of the blocks, AdamW on embeddings and norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def write_atomically(path: Path, state: dict) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, never half of one."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Train, resume, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument(
        "--steps",
        type=int,
        default=5000,
        help="steps of batch-size x 512 tokens (default 5000: 20.5 M tokens)",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast")
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)

    files = stdlib_files(held_out=False)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    tokens_file = args.output_dir / "tokens.npy"
    if tokens_file.exists():
        tokens = np.load(tokens_file)
    else:
        tokenizer = train_tokenizer(texts, args.vocab_size)
        tokenizer.save_pretrained(args.output_dir)
        encoded = tokenizer.backend_tokenizer.encode_batch(texts)
        tokens = np.concatenate([np.asarray([0, *item.ids], dtype=np.uint16) for item in encoded])
        np.save(tokens_file, tokens)
    print(f"{len(files)} files, {sum(map(len, texts)):,} characters, {len(tokens):,} tokens")

    torch.manual_seed(args.seed)
    model = new_model(args.vocab_size)
    opts = optimizers(model, args.lr)
    step, seconds, smooth = 0, 0.0, math.log(args.vocab_size)
    checkpoint = args.output_dir / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        step, seconds, smooth = state["step"], state["seconds"], state["loss"]
        print(f"resumed at step {step}")

    warmup = min(200, args.steps // 10 + 1)
    started = time.monotonic() - seconds
    model.train()
    while step < args.steps:
        progress = max(0.0, (step - warmup) / max(1, args.steps - warmup))
        factor = min(1.0, (step + 1) / warmup) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
        ids = batch_at(step, tokens, args.batch_size, args.seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * factor
            opt.step()
            opt.zero_grad()
        step += 1
        smooth += 0.02 * (loss.item() - smooth)
        if step % 50 == 0 or step == args.steps:
            seconds = time.monotonic() - started
            print(
                f"step {step}  loss {smooth:.4f}  {step * args.batch_size * CONTEXT / seconds:,.0f} tokens/s",
                flush=True,
            )
        if step % 250 == 0 or step == args.steps:
            saved = {"model": model.state_dict(), "optimizers": [opt.state_dict() for opt in opts]}
            write_atomically(
                checkpoint, {**saved, "step": step, "seconds": time.monotonic() - started, "loss": smooth}
            )

    model.eval().to(torch.bfloat16).save_pretrained(args.output_dir)
    record = {
        "text": f"{len(files)} files of the standard library of Python {platform.python_version()}",
        "held_out": list(HELD_OUT),
        "corpus_tokens": len(tokens),
        "tokens": step * args.batch_size * CONTEXT,
        "steps": step,
        "train_loss": smooth,
        "seconds": time.monotonic() - started,
        "batch_size": args.batch_size,
        "context": CONTEXT,
        "lr": args.lr,
        "seed": args.seed,
        "bf16_autocast": args.bf16,
        "optimizer": "Muon (hidden matrices, match_rms_adamw) + AdamW (rest), cosine to 10 %",
        "torch": torch.__version__,
    }
    (args.output_dir / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
