"""A cache with states serves the patch, the options, the model and the batch that made it, and no other."""

import contextlib
import copy

import pytest
import torch
import transformers
from helpers.oracle import as_oracle
from helpers.tiny_models import SIZES, build, distance, llama, tokens
from transformers import DynamicCache, StaticCache

import hf_linattn
from hf_linattn.errors import CacheError, UnsupportedCallError, UnsupportedMaskError

IDS = tokens(3, 40)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def patched(spec, options=None, **sizes):
    return hf_linattn.patch_model(llama(dtype=torch.float32, **sizes), spec, options=options)


STATEFUL = [
    "elu1", "hedgehog", "taylor2", "performer", "gated", "decay", "delta", "efficient", "flow", "window",
    "h2o", "window+gated", "window+delta", "logn+elu1",
]  # fmt: skip
OPTIONS = {"size": 8}


def options_of(spec):
    return OPTIONS if "window" in spec or spec == "h2o" else None


def cache_of(model, rows, length=20):
    return model(IDS[:rows, :length], use_cache=True).past_key_values


@pytest.mark.parametrize("spec", STATEFUL)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2), (2, 1)])
def test_another_batch_is_refused_and_the_cache_goes_on(spec, before, after):
    model = patched(spec, options_of(spec))
    cache, other = cache_of(model, before), cache_of(model, before)
    for cut in (slice(20, 21), slice(21, 22)):  # the second one is prepared
        for x in (cache, other):
            model(IDS[:before, cut], past_key_values=x)
    for length in (1, 3):
        with pytest.raises(CacheError, match=f"of a batch of {before}, and this call of {after}"):
            model(IDS[:after, 22 : 22 + length], past_key_values=cache)
    got, want = (model(IDS[:before, 22:30], past_key_values=x).logits for x in (cache, other))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("spec", "before", "after"),
    [
        *((spec, torch.float64, torch.float32) for spec in STATEFUL),
        *((spec, torch.float32, torch.float64) for spec in STATEFUL),
        ("h2o", torch.float32, torch.bfloat16),
        ("h2o", torch.bfloat16, torch.float32),
    ],
)
def test_another_dtype_is_refused_and_the_cache_goes_on(spec, before, after):
    model = patched(spec, options_of(spec)).to(before)
    cache, other = cache_of(model, 2), cache_of(model, 2)
    model.to(after)
    for length in (1, 3):
        with pytest.raises(CacheError, match=r"attn .*: the cache is of torch\.\w+, and this call"):
            model(IDS[:2, 20 : 20 + length], past_key_values=cache)
    model.to(before)
    got, want = (model(IDS[:2, 20:26], past_key_values=x).logits for x in (cache, other))
    assert torch.equal(got, want)


@pytest.mark.parametrize("spec", STATEFUL)
def test_a_state_of_inference_mode_goes_on_with_gradients(spec):
    model = patched(spec, options_of(spec))
    with torch.inference_mode():
        cache = cache_of(model, 2)
    want = model(IDS[:2, 20:23], past_key_values=copy.deepcopy(cache)).logits
    with torch.enable_grad():
        got = model(IDS[:2, 20:23], past_key_values=cache).logits
        got.square().mean().backward()
    assert distance(got, want) < 1e-6
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_rows_are_brought_to_another_batch_as_the_message_says():
    model = patched("elu1")
    cache = cache_of(model, 1)
    cache.batch_repeat_interleave(2)
    got = model(IDS[:1, 20:24].repeat(2, 1), past_key_values=cache).logits
    assert distance(got[:1], model(IDS[:1, :24]).logits[:, 20:]) < 1e-5


@pytest.mark.parametrize(
    ("made", "read"),
    [
        (("elu1", None), ("hedgehog", None)),
        (("elu1", None), ("relu", None)),
        (("elu1", None), ("delta", None)),
        (("window", {"size": 8}), ("window", {"size": 16})),
        (("window", {"size": 8}), ("elu1", None)),
        (("window", {"size": 8, "sinks": 2}), ("window", {"size": 8})),
        (("gated", None), ("gated", {"half_life": 3.0})),
        (("gated", None), ("window+gated", {"size": 8})),
        (("h2o", {"size": 8, "heavy": 4}), ("h2o", {"size": 16, "heavy": 8})),
        (("h2o", {"size": 8}), ("window", {"size": 8})),
        (("efficient", None), ("flow", None)),
        (("fox", None), ("fox", {"half_life": 3.0})),
    ],
)
def test_another_patch_or_other_options_are_refused(made, read):
    model = patched(*made)
    cache = cache_of(model, 2)
    hf_linattn.patch_model(model, read[0], options=read[1])
    for length in (1, 3):
        with pytest.raises(CacheError, match=r"another patch or of other options, .*start from a new cache"):
            model(IDS[:2, 20 : 20 + length], past_key_values=cache)
    with pytest.raises(CacheError, match="of other options"):
        model.generate(IDS[:2, :25], past_key_values=cache, max_new_tokens=2, do_sample=False)
    hf_linattn.patch_model(model, made[0], options=made[1])
    got = model(IDS[:2, 20:23], past_key_values=cache).logits
    assert got.isfinite().all()


def test_the_same_patch_made_anew_goes_on():
    model = patched("window", {"size": 8})
    cache = cache_of(model, 2)
    want = model(IDS[:2, 20:23], past_key_values=copy.deepcopy(cache)).logits
    other = patched("window", {"size": 8, "sinks": 0})  # the default, spelled out
    assert torch.equal(other(IDS[:2, 20:23], past_key_values=cache).logits, want)


def test_an_emptied_cache_serves_another_patch():
    model = patched("elu1")
    cache = cache_of(model, 2)
    cache.reset()
    hf_linattn.patch_model(model, "relu")
    want = model(IDS[:2, :20]).logits
    assert torch.equal(model(IDS[:2, :20], past_key_values=cache).logits, want)


def test_another_models_heads_are_refused():
    cache = cache_of(patched("elu1"), 2)
    other = patched("elu1", hidden_size=128, num_attention_heads=8)
    with pytest.raises(CacheError, match="another model's"):
        other(IDS[:2, 20:21], past_key_values=cache)


def test_a_static_cache_serves_its_patch_alone():
    model = patched("elu1")
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(IDS[:2, :20], past_key_values=cache)
    hf_linattn.patch_model(model, "hedgehog")
    with pytest.raises(CacheError, match="another patch"):
        model(IDS[:2, 20:21], past_key_values=cache)


@pytest.mark.parametrize("spec", ["elu1", "window+gated", "h2o"])
def test_an_early_exit_drafts_and_leaves_the_model_whole(spec):
    """transformers cuts the model while it drafts, and would leave it so after an error."""
    model = patched(spec, options_of(spec)).eval()
    ids, layers = IDS[:1, :20], model.config.num_hidden_layers
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    got = model.generate(ids, max_new_tokens=6, do_sample=False, assistant_early_exit=1)
    assert torch.equal(got, want)
    assert model.config.num_hidden_layers == layers
    assert len(DynamicCache(config=model.config).layers) == layers


@pytest.mark.parametrize("spec", ["elu1", "gated", "window+gated", "window+hedgehog", "delta", "h2o"])
def test_a_prepared_token_reads_the_weights_of_the_model_that_is_called(spec):
    model = patched(spec, options_of(spec))
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if ".linattn." in name:
            parameter.sub_(1.0)
    cache, plain = cache_of(model, 2, 18), cache_of(model, 2)
    for place in (18, 19):
        model(IDS[:2, place : place + 1], past_key_values=cache)
    for place in range(20, 24):
        cut = IDS[:2, place : place + 1]
        got, want = (other(cut, past_key_values=x).logits for x in (cache, plain))
        assert distance(got, want) < 1e-5


@pytest.mark.parametrize("spec", STATEFUL)
def test_decoding_leaves_a_backward_that_is_still_to_come_alone(spec):
    def gradients(decode):
        model = patched(spec, options_of(spec))
        cache = cache_of(model, 2)
        with torch.enable_grad():
            loss = model(IDS[:2, 20:23], past_key_values=cache).logits.square().mean()
        for place in range(23, 33) if decode else ():
            model(IDS[:2, place : place + 1], past_key_values=cache)
        loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad

    assert torch.equal(gradients(True), gradients(False))


@pytest.mark.parametrize("spec", ["elu1", "gated", "window", "h2o"])
def test_holes_of_the_past_that_add_up_are_told_apart(spec):
    """Places 1 and 4, and 2 and 3."""
    model, mask = patched(spec, options_of(spec)), torch.ones(2, 40, dtype=torch.long)
    mask[0, [0, 3]] = mask[1, [1, 2]] = 0
    cache = model(IDS[:2, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    with pytest.raises(UnsupportedMaskError, match="other past tokens"):
        model(IDS[:2, 6:9], attention_mask=mask.flip(0)[:, :9], past_key_values=cache)


@pytest.mark.parametrize("spec", ["elu1", "window", "h2o"])
def test_a_static_cache_that_is_full_says_so(spec):
    model = patched(spec, options_of(spec))
    cache = StaticCache(config=model.config, max_cache_len=16)
    got = [model(IDS[:2, :10], past_key_values=cache).logits]
    got += [model(IDS[:2, place : place + 1], past_key_values=cache).logits for place in range(10, 16)]
    assert distance(torch.cat(got, 1), model(IDS[:2, :16]).logits) < 1e-5
    with pytest.raises(CacheError, match="for 16 tokens, and these are 1 behind 16"):
        model(IDS[:2, 16:17], past_key_values=cache)


LOOPS = {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 2}
FULL = ["full_attention"] * 3


@pytest.mark.skipif(not hasattr(transformers, "DoryForCausalLM"), reason="Dory came with transformers 5.24")
@pytest.mark.parametrize("spec", ["elu1", "window", "h2o", "softmax1", "softmax1+logn"])
def test_a_past_that_another_pass_over_the_layer_has_written(spec):
    """Layers of dory run several times; in this mode the last pass alone writes keys, and the others read."""
    sizes = {**SIZES, **LOOPS, "layer_types": FULL}
    model = build("DoryForCausalLM", **sizes, recurrent_kv_cache_mode="last_loop")
    with as_oracle(model, spec) if "softmax1" in spec else contextlib.nullcontext():
        want = decoded(model)
    hf_linattn.patch_model(model, spec, options=options_of(spec))
    if "softmax1" in spec:
        assert distance(decoded(model), want) < 1e-9
    else:
        with pytest.raises(UnsupportedCallError, match=r"another pass .*: use softmax1 or logn"):
            decoded(model)
    assert model(IDS[:2], use_cache=False).logits.isfinite().all()


def decoded(model):
    first = model(IDS[:2, :20], use_cache=True)
    rest = [model(IDS[:2, 20:21], past_key_values=first.past_key_values).logits]
    rest += [model(IDS[:2, 21:24], past_key_values=first.past_key_values).logits]
    return torch.cat([first.logits, *rest], 1)
