"""A text that begins in a cache, by the short way, goes on as it is in one forward without a cache."""

import copy

import pytest
import torch
from helpers import tiny_models
from helpers.random_inputs import relative_error

from hf_linattn import patch_model, use_branches
from hf_linattn.patching import module, steps

SPECS = {
    "elu1": {},
    "gated": {},
    "decay": {},
    "window": {"sinks": 3},
    "window+elu1": {},
    "window+gated": {"sinks": 3},
    "window+hedgehog": {"mix": "learned"},
    "window+decay": {"sinks": 1, "mix": "interpolated"},
    "window+delta": {},
}
SIZE, LENGTH = 40, 56


def patched(spec, dtype):
    options = {"window": {"size": SIZE, **SPECS[spec]}} if "window" in spec else None
    torch.manual_seed(0)
    return patch_model(tiny_models.llama(dtype=dtype), spec, options=options)


@pytest.fixture
def begun(monkeypatch):
    """Lengths of the texts that began by the short way, one for each layer."""
    lengths = []

    def spy(child, layer, query, *rest):
        output = steps.begin(child, layer, query, *rest)
        if output is not None:
            lengths.append(query.shape[2])
        return output

    monkeypatch.setattr(module, "begin", spy)
    return lengths


def decoded(model, ids, first, change=None, at=24, **given):
    """Logits of all tokens, `first` of them at once and the others one by one; `change` at one of them."""
    out = model(ids[:, :first], use_cache=True, **given)
    logits, cache, done = [out.logits], out.past_key_values, first
    while done < ids.shape[1]:
        step = 1
        if done == at and change is not None:
            cache, step = change(model, cache, ids) or (cache, 1)
        logits.append(model(ids[:, done : done + step], past_key_values=cache).logits)
        done += step
    return torch.cat(logits, 1)


FIRSTS = [1, 5, 31, 33, SIZE, SIZE + 1]


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_text_goes_on_as_it_is_without_a_cache(spec, first, begun, compiled):
    follows(spec, first, torch.float32, 1e-4)
    short = first <= SIZE and spec != "window+delta" if "window" in spec else spec != "decay"
    assert begun == [first] * 2 * short


@pytest.mark.parametrize("first", [5, 33])
@pytest.mark.parametrize("spec", SPECS)
def test_and_so_it_does_by_torch(spec, first, begun):
    follows(spec, first, torch.float64, 1e-10)
    assert begun == [first] * 2 * ("window" in spec and spec != "window+delta")


def follows(spec, first, dtype, bound):
    ids = tiny_models.tokens(2, LENGTH)
    want = patched(spec, torch.float64)(ids, use_cache=False).logits  # with gradients: nothing is left out
    assert want.requires_grad
    with torch.no_grad():
        got = decoded(patched(spec, dtype), ids, first)
    assert relative_error(got.double(), want.detach()) < bound


def several(model, cache, ids):
    return cache, 7


def with_gradients(model, cache, ids):
    with torch.enable_grad():
        assert model(ids[:, 24:25], past_key_values=copy.deepcopy(cache)).logits.requires_grad


def turned(model, cache, ids):
    cache.reorder_cache(torch.tensor([1, 0]))


def copied(model, cache, ids):
    return copy.deepcopy(cache), 1


def branch_off(model, cache, ids):
    with use_branches(model, "linear"):
        model(ids[:, 24:25], past_key_values=cache)
        model(ids[:, 24:27], past_key_values=cache)


def autocast(model, cache, ids):
    with torch.autocast("cpu", torch.bfloat16):
        model(ids[:, 24:25], past_key_values=cache)


CHANGES = [several, with_gradients, turned, copied, branch_off, autocast]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("spec", [x for x in SPECS if x not in ("decay", "window+delta")])
def test_what_comes_between_does_what_it_did(spec, change, begun, compiled, monkeypatch):
    if change is branch_off and "+" not in spec:
        pytest.skip("no branches")
    ids, model = tiny_models.tokens(2, LENGTH), patched(spec, torch.float32)
    got = decoded(model, ids, 20, change)
    assert begun == [20, 20]
    monkeypatch.setattr(module, "begin", lambda *_: None)
    want = decoded(model, ids, 20, change)
    assert relative_error(got, want) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("spec", ["window", "window+gated", "window+hedgehog"])
def test_rows_are_full_at_different_times(spec, begun, compiled):
    """One row has two padded tokens behind those that it began with."""
    ids, mask = tiny_models.tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 24:26] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    want = patched(spec, torch.float64)(ids, attention_mask=mask, position_ids=places, use_cache=False)
    model, cache, logits = patched(spec, torch.float32), None, []
    for start, end in ((0, 20), *((i, i + 1) for i in range(20, LENGTH))):
        step = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **step)
        cache = out.past_key_values
        logits.append(out.logits)
    assert begun == [20, 20]
    got, seen = torch.cat(logits, 1).double(), mask.bool()
    assert relative_error(got[seen], want.logits[seen]) < 1e-4


@torch.no_grad()
def test_a_cache_holds_no_more_than_its_text(compiled):
    model, ids = patched("window+gated", torch.float32), tiny_models.tokens(1, LENGTH)
    held, cache = [], model(ids[:, :5], use_cache=True).past_key_values
    for i in range(5, LENGTH):
        model(ids[:, i : i + 1], past_key_values=cache)
        state = cache.layers[0].state
        held.append((state.valid.shape[1], state.z.numel() > 0))
    assert held == [(32, False)] * 27 + [(SIZE, True)] * (LENGTH - 32)


@torch.no_grad()
@pytest.mark.parametrize(("sinks", "first"), [(3, 1), (45, 5)], ids=["few tokens", "more sinks than columns"])
def test_sinks_come_out_of_a_short_ring(sinks, first, begun, compiled):
    """With several tokens at once, before which there are fewer than sinks."""
    ids, options = tiny_models.tokens(2, 100), {"window": {"size": SIZE, "sinks": sinks, "positions": "text"}}

    def model(dtype):
        torch.manual_seed(0)
        return patch_model(tiny_models.llama(dtype=dtype), "window+elu1", options=options)

    want = model(torch.float64)(ids, use_cache=False).logits
    got = decoded(model(torch.float32), ids, first, several, at=first)
    assert begun == [first] * 2
    assert relative_error(got.double(), want) < 1e-4
