"""Models with sliding windows: kept, or dropped by sliding="global", with and without a cache."""

import itertools
from itertools import pairwise

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.selection import rest_full
from helpers.tiny_models import SIZES, build, distance, grow, left_padded, positions, tokens
from transformers import DynamicCache, Llama4TextConfig, StaticCache
from transformers.masking_utils import chunked_causal_mask_function

import hf_linattn
from hf_linattn.attention.masks import NO_CHUNKS, compact_mask
from hf_linattn.errors import CacheError, LinattnError

EXACT = 1e-9
every_patch = pytest.mark.parametrize("patch", ["elu1", "softmax1", "logn", "softmax1+logn"])
HYBRID = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
QWEN2 = ("Qwen2ForCausalLM", {**HYBRID, "use_sliding_window": True})
GEMMA3 = ("Gemma3ForCausalLM", {**HYBRID, "query_pre_attn_scalar": 8})
MISTRAL = ("MistralForCausalLM", {"sliding_window": 16})
SLIDING = {
    "mistral, global": (*MISTRAL, "global"),
    "mistral, keep": (*MISTRAL, "keep"),
    "qwen2, keep": (*QWEN2, "keep"),
    "qwen2, global": (*QWEN2, "global"),
    "gemma3, keep": (*GEMMA3, "keep"),
    "gemma3, global": (*GEMMA3, "global"),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def in_pieces(model, ids, cuts, mask, cache):
    outputs = []
    for start, end in pairwise(cuts):
        at = {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
        outputs.append(model(ids[:, start:end], past_key_values=cache, **at).logits)
    return torch.cat(outputs, 1)


def cannot_apply(patch, name):
    return patch == "elu1" and name == "mistral, keep"


@pytest.mark.parametrize("name", SLIDING)
@every_patch
def test_pieces_and_one_forward_equal_the_oracle(patch, name):
    cls, config, sliding = SLIDING[name]
    model = build(cls, num_hidden_layers=2, **SIZES, **config)
    if cannot_apply(patch, name):
        with pytest.raises(LinattnError, match="sliding='global'"):
            hf_linattn.patch_model(model, patch, sliding=sliding)
        return
    ids, mask = left_padded(tokens(2, 60), 9)
    mask[1, [12, 13, 14, 30, 50]] = 0  # in the model's own window a padded token takes a place
    live, at = mask.bool(), {"attention_mask": mask, "position_ids": positions(mask)}
    with as_oracle(model, patch, windows=sliding == "keep", **_where(patch, sliding)):
        want = model(ids, use_cache=False, **at).logits
    hf_linattn.patch_model(model, patch, sliding=sliding)
    assert distance(model(ids, use_cache=False, **at).logits[live], want[live]) < EXACT
    cuts = (0, 25, 26, 40, *range(41, 61))
    caches = [DynamicCache(config=model.config), DynamicCache()]
    if not (name.startswith("mistral") and sliding == "global"):
        caches.append(StaticCache(config=model.config, max_cache_len=64))
    for cache in caches:
        assert distance(in_pieces(model, ids, cuts, mask, cache)[live], want[live]) < EXACT


def _where(patch, sliding):
    if patch != "elu1" or sliding == "global":
        return {}
    return {"where": lambda module: module.config.layer_types[module.layer_idx] == "full_attention"}


@pytest.mark.parametrize("sliding", ["keep", "global"])
@pytest.mark.parametrize("patch", ["elu1", "softmax1+logn"])
def test_packed_documents_behind_chunks_equal_the_oracle(patch, sliding):
    """Chunks of llama4 begin at each document, and are dropped where that was asked for."""
    config = {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}
    sizes = {**SIZES, "intermediate_size_mlp": 64, "num_local_experts": 2, "no_rope_layers": [1, 1]}
    model = build("Llama4ForCausalLM", num_hidden_layers=2, **sizes, **config)
    lengths, ids = (30, 16, 1, 40), tokens(2, 87)
    where = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    with as_oracle(model, patch, windows=sliding == "keep", **_where(patch, sliding)):
        want = torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    hf_linattn.patch_model(model, patch, sliding=sliding)
    assert distance(model(ids, position_ids=where, use_cache=False).logits, want) < 1e-5  # float32 norms


def test_compiled_code_does_not_take_chunks_for_documents():
    """It cannot tell them apart. Without `fullgraph` the mask is then made by eager code, which can."""
    config = Llama4TextConfig(attention_chunk_size=8)
    setattr(config, NO_CHUNKS, True)
    arguments = (1, 20, 20, 0, 0, chunked_causal_mask_function(8, torch.zeros(1)), None, 8)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run eagerly"):
        torch.compile(compact_mask, backend="eager", fullgraph=True)(*arguments, config=config)
    want = compact_mask(*arguments, config=config)
    assert torch.equal(torch.compile(compact_mask, backend="eager")(*arguments, config=config), want)
    torch._dynamo.reset()


GENERATED = list(itertools.product(("elu1", "softmax1+logn"), SLIDING))


@pytest.mark.parametrize(("patch", "name"), rest_full(GENERATED, GENERATED[:6:2] + GENERATED[7::2]))
def test_generate(patch, name):
    if cannot_apply(patch, name):
        pytest.skip("elu1 keeps no window, and every layer has one")
    cls, config, sliding = SLIDING[name]
    model = hf_linattn.patch_model(build(cls, num_hidden_layers=2, **SIZES, **config), patch, sliding=sliding)
    ids, mask = left_padded(tokens(2, 30), 9)
    want = grow(model, ids, 12, mask)
    kwargs = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **kwargs), want)
    beams = [model.generate(ids, num_beams=3, use_cache=cached, **kwargs) for cached in (True, False)]
    assert torch.equal(*beams)
    one = grow(model, ids[1:], 12)
    looked_up = model.generate(ids[1:], **{**kwargs, "attention_mask": mask[1:]}, prompt_lookup_num_tokens=3)
    assert torch.equal(looked_up, one)
    static = {"cache_implementation": "static", **kwargs}
    if name == "mistral, global":
        with pytest.raises(CacheError, match="does not tell its length"):
            model.generate(ids, **static)
    else:
        assert torch.equal(model.generate(ids, **static), want)


@pytest.mark.parametrize("patch", ["elu1", "softmax1"])
def test_dropped_keys_are_not_forgotten_in_silence(patch):
    model = build(MISTRAL[0], num_hidden_layers=2, **SIZES, sliding_window=16)
    ids = tokens(1, 30)
    short, long = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :10], past_key_values=short)
    model(ids[:, :20], past_key_values=long)
    hf_linattn.patch_model(model, patch, sliding="global")
    model(ids[:, 10:20], past_key_values=short)  # nothing was dropped yet
    with pytest.raises(CacheError, match="dropped keys"):
        model(ids[:, 20:], past_key_values=long)
