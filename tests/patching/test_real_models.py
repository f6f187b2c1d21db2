"""Trained checkpoints: patches at the training length against the oracle, on text."""

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.real_data import DATA, needs_data
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import patch_model, unpatch_model

TEXTS = {
    "stories260k": "text/tinystories/val.txt",
    "tinystories-656k": "text/tinystories/val.txt",
    "books-1m": "text/books/eval/Emma.md",
}


@needs_data
@pytest.mark.parametrize("patch", ["elu1", "softmax1", "logn", "softmax1+logn"])
@pytest.mark.parametrize("name", TEXTS)
@torch.no_grad()
def test_patched_model_is_the_oracle_at_its_training_length(name, patch):
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models" / name)
    text = (DATA / TEXTS[name]).read_text(encoding="utf-8")[:8000]
    ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"][:512]])
    assert ids.shape[1] == 512
    model = AutoModelForCausalLM.from_pretrained(DATA / "models" / name, dtype=torch.float64).eval()
    before = model(ids, use_cache=False).logits
    with as_oracle(model, patch):
        want = model(ids, use_cache=False).logits
    patch_model(model, patch)
    got = model(ids, use_cache=False).logits
    assert float((got - want).abs().max()) < 1e-4  # the models' norms compute in float32
    assert float((got - before).abs().max()) > 1e-2
    unpatch_model(model)
    assert torch.equal(model(ids, use_cache=False).logits, before)
