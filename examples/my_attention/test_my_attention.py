"""What a patch in a package of its own should show: its formula, its options, and that it is registered."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn import available_patches, describe, patch_model, unpatch_model
from hf_linattn.errors import OptionError
from hf_linattn.patching.cache_layers import CACHE_NAME, output_cache


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def by_bisection(scores):
    """The tau with sum_j max(s_j - tau, 0) = 1, one row."""
    low, high = scores.max() - 1, scores.max()
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if (scores - middle).clamp(min=0).sum() > 1 else (low, middle)
    return (scores - low).clamp(min=0)


def test_it_is_found():
    assert "simplex" in available_patches()["sparsemax"]


@torch.no_grad()
def test_it_is_the_formula(model):
    patch_model(model, "sparsemax")
    attention = model.model.layers[0].self_attn.linattn.sparsemax
    scores = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    weights = attention.weights(scores, mask, None)
    for head in range(2):
        for row in range(7):
            want = by_bisection(scores[0, head, row, : row + 1])
            torch.testing.assert_close(weights[0, head, row, : row + 1], want)
    assert not weights.masked_select(~mask).any()


@torch.no_grad()
def test_decoding_padding_and_unpatching(model):
    ids = torch.randint(1, 50, (1, 20))
    before = model(ids).logits
    patch_model(model, "sparsemax", options={"scale": 2.0})
    after = model(ids).logits
    assert not torch.allclose(after, before)
    first = model(ids[:, :15], use_cache=True)
    second = model(ids[:, 15:], **{CACHE_NAME: output_cache(first)})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), after, rtol=1e-5, atol=1e-5)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], 1)
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], after, rtol=1e-5, atol=1e-5)
    print(describe(model))
    unpatch_model(model)
    assert torch.equal(model(ids).logits, before)


def test_bad_scale(model):
    with pytest.raises(OptionError, match="scale must be above 0, got 0"):
        patch_model(model, "sparsemax", options={"scale": 0.0})
