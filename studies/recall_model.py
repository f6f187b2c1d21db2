"""Train a model that is small and can recall, on a CPU in some minutes: the second example of docs/layers.md.

python studies/recall_model.py --data books/ --output-dir recalling

Llama, 4 layers of 64, one token per byte, 64 tokens of context. Three rows of four repeat a segment of random
bytes, so that it learns to continue what stood before; the fourth is text, so that it has a perplexity.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_linattn.data import load_documents

BOS, ROWS, LENGTH = 256, 32, 64
SEGMENTS = (4, 28)
"""Least and greatest length of what is repeated."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, and a BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def new_model() -> LlamaForCausalLM:
    """Random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BOS + 1,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=BOS,
            eos_token_id=None,
        )
    )


def batch(text: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """`[ROWS, LENGTH]`, BOS first."""
    rows = []
    for row in range(ROWS):
        if row % 4:
            segment = torch.tensor([rng.randrange(BOS) for _ in range(rng.randint(*SEGMENTS))])
            rows.append(segment.repeat(LENGTH // len(segment) + 1)[:LENGTH])
        else:
            start = rng.randrange(len(text) - LENGTH)
            rows.append(text[start : start + LENGTH])
    ids = torch.stack(rows)
    ids[:, 0] = BOS
    return ids


def main(argv: list[str] | None = None) -> int:
    """Train and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="text, as hf_linattn.finetune takes it")
    parser.add_argument("--steps", type=int, default=1500, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer, model = byte_tokenizer(), new_model()
    texts = load_documents(args.data)["text"][:4]
    ids = tokenizer("".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    text = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05)
    for step in (bar := tqdm(range(args.steps), unit="step")):
        optimizer.param_groups[0]["lr"] = args.lr * min((step + 1) / 50, max(0.05, 1 - step / args.steps))
        inputs = batch(text, rng)
        loss = model(inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            bar.set_postfix_str(f"loss {loss.item():.3f}")
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
