"""fox: where it starts, the two ways of its decay into the scores, gates in caches, and what it refuses."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.properties import (
    check_decode,
    check_forward,
    check_gradient,
    check_half_precision,
    check_packing,
    check_padding,
    learned,
)
from helpers.tiny_models import (
    ENCODER_DECODER_SIZES,
    SIZES,
    build,
    distance,
    left_padded,
    llama,
    positions,
    tokens,
)
from helpers.versions import OLD
from transformers import DynamicCache, QuantizedCache, StaticCache

from hf_linattn import patch_model, unpatch_model
from hf_linattn.attention import scores
from hf_linattn.attention.gate_layer import GateLayer
from hf_linattn.errors import CacheError, OptionError, UnsupportedMaskError, UnsupportedModelError
from hf_linattn.ops.softmax import softmax_attention, with_decay

WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SLIDING = {
    "llama": ("LlamaForCausalLM", {}, "keep"),
    "gemma3, keep": ("Gemma3ForCausalLM", WINDOWS, "keep"),
    "gemma3, global": ("Gemma3ForCausalLM", WINDOWS, "global"),
    "mistral, keep": ("MistralForCausalLM", {"sliding_window": 16}, "keep"),
}


def shaken(model, spec="fox", half_life=8.0, **options):
    """Patched, with gates that differ from token to token."""
    patch_model(model, spec, options={"fox": {"half_life": half_life, **options}})
    return shake(model)


def shake(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn.fox." in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


def in_pieces(model, ids, cuts, cache, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    parts = [
        model(
            ids[:, a:b],
            attention_mask=mask[:, :b],
            position_ids=positions(mask)[:, a:b],
            past_key_values=cache,
        ).logits
        for a, b in pairwise(cuts)
    ]
    return torch.cat(parts, 1)


@torch.no_grad()
def test_it_starts_near_the_original_and_at_its_half_life():
    model, ids = llama(), tokens(2, 40)
    want, far = model(ids).logits, []
    for half_life in (4.0, 1e3, 1e6, 1e9):
        patch_model(model, "fox", options={"half_life": half_life})
        far.append(distance(model(ids).logits, want))
        [gate] = set(learned(model)[model.model.layers[0].self_attn]["fox.bias"].sigmoid().tolist())
        assert gate**half_life == pytest.approx(0.5)
    assert far[0] > 1
    assert all(near > 20 * farther for near, farther in pairwise(far))


def test_two_ways_into_the_scores(monkeypatch):
    """As channels, from a number of queries on, and as a bias: both are the oracle's."""
    for long in (1, 10**9):
        monkeypatch.setattr(scores, "LONG", long)
        for case in ("fox", "fox, value", "fox, softmax1+logn"):
            check_forward("llama", case, (1, 65))
            check_gradient("llama", case)
        check_padding("mqa, odd head_dim", "fox", "middle")
        check_packing("gpt2", "fox, softmax1+logn")
        check_decode("gemma3", "fox", (0, 7, 71, 72, 100))
        check_half_precision("qwen3", "fox", torch.float16)


@pytest.mark.parametrize("spec", ["fox+entmax15", "fox+local", "alibi+fox", "fox+nope", "fox+topk"])
@torch.no_grad()
def test_compositions(spec):
    model, ids, options = llama(), tokens(1, 50), {"local": {"size": 8}, "topk": {"k": 5}}
    options = {name: given for name, given in options.items() if name in spec}
    weights = learned(patch_model(model, spec, options={"half_life": 8.0, **options}))
    unpatch_model(model)
    flat = {key: value for given in options.values() for key, value in given.items()}
    with as_oracle(model, spec, learned=weights, **flat):
        want = model(ids, use_cache=False).logits
    patch_model(model, spec, options={"half_life": 8.0, **options})
    assert distance(model(ids, use_cache=False).logits, want) < 1e-9
    cache = DynamicCache(config=model.config)
    assert distance(in_pieces(model, ids, (0, 20, 21, 50), cache), want) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
def test_a_decay_in_channels_keeps_its_precision(dtype):
    """A decay of hundreds: rounded to bfloat16 as it stands, it would be wrong by 1."""
    given = torch.float32 if dtype == "autocast" else dtype
    query, key, value = (torch.randn(1, heads, 200, 16).to(given) for heads in (4, 2, 2))
    c = -torch.rand(1, 4, 200, dtype=torch.float64).mul(4).cumsum(-1)
    exact = query.double() @ key.double().repeat_interleave(2, 1).mT / 4 + c[..., None] - c[..., None, :]
    want = exact.masked_fill(~torch.ones(200, 200, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    want = want @ value.double().repeat_interleave(2, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        inputs = with_decay(query, key, value, (c.float(), c.float()), 0.25)
        got = softmax_attention(*inputs, is_causal=True, scaling=0.25)[..., :16]
    assert distance(got, want) < (1e-3 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("name", SLIDING)
@torch.no_grad()
def test_gates_in_caches(name):
    cls, config, sliding = SLIDING[name]
    model = build(cls, num_hidden_layers=2, **SIZES, **config)
    ids, mask = left_padded(tokens(2, 60), 9)
    mask[1, [12, 13, 30, 50]] = 0
    for source in ("hidden", "value"):
        options = {"half_life": 8.0, "source": source}
        shake(patch_model(model, "softmax1+fox", options=options, sliding=sliding))
        at = {"attention_mask": mask, "position_ids": positions(mask)}
        want = model(ids, use_cache=False, **at).logits[mask.bool()]
        for cache in (
            DynamicCache(config=model.config),
            DynamicCache(),
            StaticCache(config=model.config, max_cache_len=64),
        ):
            got = in_pieces(model, ids, (0, 25, 26, 40, *range(41, 61)), cache, mask)
            assert distance(got[mask.bool()], want) < 1e-9
            assert all(isinstance(layer, GateLayer) == (source == "hidden") for layer in cache.layers)


@torch.no_grad()
def test_rows_and_tokens_of_a_cache():
    model, ids = shaken(llama()), tokens(2, 40)
    want = model(ids, use_cache=False).logits
    for make in (
        lambda: DynamicCache(config=model.config),
        lambda: StaticCache(config=model.config, max_cache_len=50),
    ):
        cache = make()
        assert distance(in_pieces(model, ids, (0, 30), cache), want[:, :30]) < 1e-9
        cache.reorder_cache(torch.tensor([1, 0]))
        apart = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        assert distance(in_pieces(model, ids.flip(0), (30, 35), cache), want.flip(0)[:, 30:35]) < 1e-9
        assert distance(in_pieces(model, ids.flip(0), (30, 40), apart), want.flip(0)[:, 30:]) < 1e-9
        if OLD and isinstance(cache, DynamicCache):
            continue  # its reset keeps the length
        cache.reset()
        assert distance(in_pieces(model, ids, (0, 10, 40), cache), want) < 1e-9
    cache = DynamicCache(config=model.config)
    in_pieces(model, ids, (0, 30), cache)
    cache.crop(-10)
    assert distance(in_pieces(model, ids, (20, 25), cache), want[:, 20:25]) < 1e-9
    cache.batch_repeat_interleave(2)
    four = ids.repeat_interleave(2, 0)
    assert distance(in_pieces(model, four, (25, 30), cache)[::2], want[:, 25:30]) < 1e-9
    cache.batch_select_indices(torch.tensor([2]))
    assert distance(in_pieces(model, ids[1:], (30, 40), cache), want[1:, 30:]) < 1e-9


@pytest.mark.skipif(OLD, reason="this transformers fails there, unpatched too")
@torch.no_grad()
def test_cropping_a_window_that_records_its_past():
    cls, config, _ = SLIDING["gemma3, keep"]
    model, ids = shaken(build(cls, num_hidden_layers=2, **SIZES, **config)), tokens(1, 60)
    want = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    in_pieces(model, ids, (0, 40, 41, 48), cache)
    cache.crop(-5)
    assert distance(in_pieces(model, ids, (43, 50, 60), cache), want[:, 43:]) < 1e-9


@torch.no_grad()
def test_gates_that_do_not_follow_are_noticed():
    model, ids = shaken(llama()), tokens(2, 40)
    cache = DynamicCache(config=model.config)
    in_pieces(model, ids, (0, 30), cache)
    for layer in cache.layers:
        layer.gates.reorder_cache = layer.gates.crop = lambda *args: None
    cache.reorder_cache(torch.tensor([1, 0]))
    want = model(ids.flip(0), use_cache=False).logits[:, 30:35]
    assert distance(in_pieces(model, ids.flip(0), (30, 35), cache), want) > 1e-3
    cache.crop(-5)
    with pytest.raises(CacheError, match=r"the cache has 35 tokens and gates of 40. Start from a new cache"):
        in_pieces(model, ids, (30, 35), cache)


@torch.no_grad()
def test_a_cache_of_the_unpatched_model():
    model, ids = llama(), tokens(1, 30)
    cache = DynamicCache(config=model.config)
    in_pieces(model, ids, (0, 20), cache)
    before = copy.deepcopy(cache)
    shaken(model)
    with pytest.raises(CacheError, match=r"hidden state of past tokens too.*source='value'"):
        in_pieces(model, ids, (20, 30), cache)
    shaken(model, source="value")
    assert in_pieces(model, ids, (20, 30), before).shape == (1, 10, 97)


@pytest.mark.skipif(OLD, reason="this transformers has no cache quantised to fp8")
def test_caches_that_keep_no_gates():
    model = shaken(llama(dtype=torch.float32))
    cache = QuantizedCache("fp8", model.config)
    with pytest.raises(CacheError, match=r"type Fp8QuantizedLayer cannot keep gates.*source='value'"):
        in_pieces(model, tokens(1, 5), (0, 5), cache)
    with pytest.raises(UnsupportedModelError, match=r"'fox' at model.layers.0.* keeps gates.*'value'"):
        model.init_continuous_batching()


def test_modules_that_it_cannot_serve():
    model = build("BartForConditionalGeneration", **ENCODER_DECODER_SIZES)
    with pytest.raises(UnsupportedModelError, match="is bidirectional, and 'fox' is causal only: forgetting"):
        patch_model(model, "fox")
    with pytest.raises(UnsupportedModelError, match=r"encoder_attn .* is bidirectional"):
        patch_model(model, {"*.encoder_attn": "fox"})
    with pytest.raises(OptionError, match="'fox' changes the scores of an attention, and 'elu1' has none"):
        patch_model(llama(), "elu1+fox")
    with pytest.raises(OptionError, match="half_life must be at least 1 token"):
        patch_model(llama(), "fox", options={"half_life": 0.5})


@torch.no_grad()
def test_masks_of_the_caller():
    model, ids = shaken(llama()), tokens(2, 20)
    causal = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    causal[0, :, :, 5:8] = False
    mask = torch.ones_like(ids)
    mask[0, 5:8] = 0
    want = model(ids, attention_mask=mask, position_ids=torch.arange(20)[None]).logits[mask.bool()]
    assert distance(model(ids, attention_mask=causal).logits[mask.bool()], want) < 1e-9
    with pytest.raises(UnsupportedMaskError, match="shows a query the keys behind it"):
        model(ids, attention_mask=torch.ones_like(causal))
    causal[..., :3, :3] = True  # a prefix
    with pytest.raises(UnsupportedMaskError, match="a prefix"):
        model(ids, attention_mask=causal)


@torch.no_grad()
def test_the_decoder_of_an_encoder_and_decoder():
    model = build("BartForConditionalGeneration", **ENCODER_DECODER_SIZES)
    shaken(model, {"decoder.layers.*.self_attn": "softmax1+fox"})
    inputs, kwargs = {"input_ids": tokens(2, 11)}, {"max_new_tokens": 20, "do_sample": False, "num_beams": 3}
    want = model.generate(**inputs, use_cache=False, **kwargs)
    assert torch.equal(model.generate(**inputs, **kwargs), want)


@torch.no_grad()
def test_compiled_it_is_one_graph():
    torch._dynamo.reset()
    model, (ids, mask) = shaken(llama(1), "softmax1+fox"), left_padded(tokens(2, 140), 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want, got = (each(ids, attention_mask=mask, use_cache=False).logits for each in (model, compiled))
    assert distance(got[mask.bool()], want[mask.bool()]) < 1e-9
    torch._dynamo.reset()
