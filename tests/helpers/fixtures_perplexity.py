"""What the perplexity tests share: a tiny model on disk, texts, and how to read a curve."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = ["Wörter … " + " ".join(f"{n * n % k} é {n}" for n in range(k)) for k in (160, 60, 100, 5)]
"""About 1,700, 600 and 1,100 bytes, one token each, and one text that is too short for any window here."""


def make_texts(path, texts=TEXTS):
    """The texts as jsonl."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def make_folder(path):
    """A tiny random Llama with one token per byte and a BOS that its tokenizer adds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(path)
    return path


def curve(rows, key="perplexity"):
    return [row[key] if isinstance(row, dict) else getattr(row, key) for row in rows]
