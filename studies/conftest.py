"""Tests of the study: `python -m pytest studies`; they are no part of the fast suite."""

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(scope="session")
def data():
    """The folder with real models and texts."""
    folder = Path(os.environ.get("HF_LINATTN_DATA") or HERE.parent.parent / "shared" / "data")
    if not (folder / "models").is_dir():
        pytest.skip(f"no real models: {folder} is no such folder (set HF_LINATTN_DATA)")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a model of two layers, width 16, one token per byte, 64 tokens of context."""
    from recall_model import BOS, byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=BOS + 1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=BOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
