"""One patched model, several threads: what a call notes is seen by its own thread alone."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.selection import rest_full
from helpers.tiny_models import llama, tokens

from hf_linattn import patch_model
from hf_linattn.errors import CacheError, UnsupportedCallError
from hf_linattn.patching import interface

LENGTHS = (3, 17, 70, 26)
NEW = 10


def generated(model, seed, length):
    with torch.no_grad():
        ids = tokens(1, length, seed=seed)
        return model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.mark.parametrize(
    ("spec", "options"),
    rest_full(
        [
            ("elu1", {}),
            ("window+hedgehog", {"size": 8}),
            ("window+hedgehog", {"size": 8, "sinks": 2}),
            ("gated", {}),
            ("softmax1", {}),
        ],
        [("elu1", {}), ("window+hedgehog", {"size": 8, "sinks": 2}), ("softmax1", {})],
    ),
    ids=str,
)
def test_threads_generate_what_one_thread_does(spec, options):
    model = patch_model(llama(dtype=torch.float32), spec, options=options)
    want = [[generated(model, seed, length) for length in LENGTHS] for seed in range(4)]
    start = threading.Barrier(4)

    def work(seed):
        start.wait()
        lengths = LENGTHS[seed:] + LENGTHS[:seed]  # no two threads alike
        found = {length: generated(model, seed, length) for length in lengths}
        return [found[length] for length in LENGTHS]

    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(work, range(4)), want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_a_failed_call_leaves_behind_is_its_threads_own():
    model, ids = patch_model(llama(), "elu1"), tokens(1, 20)
    want = model(ids).logits
    attention = model.model.layers[0].self_attn
    broken = attention.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(model, ids).result()
    broken.remove()
    early = attention.q_proj.register_forward_pre_hook(lambda *_: 1 / 0)  # before its attention is asked
    with pytest.raises(ZeroDivisionError):
        model(ids)
    early.remove()
    assert torch.equal(model(ids).logits, want)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model, ids).result().logits, want)
    assert torch.equal(copy.deepcopy(model)(ids).logits, want)


def test_an_attention_asked_twice_in_a_forward_is_refused(monkeypatch):
    model, ids = patch_model(llama(1), "elu1"), tokens(1, 20)
    attention = model.model.layers[0].self_attn
    want, real = model(ids).logits, attention.o_proj.forward

    def again(x):
        shape = (1, 20, -1, attention.head_dim)
        query = attention.q_proj(torch.zeros(1, 20, model.config.hidden_size, dtype=x.dtype)).view(shape)
        key = query[:, :, : model.config.num_key_value_heads].transpose(1, 2)
        interface.attention(attention, query.transpose(1, 2), key, key)
        return real(x)

    monkeypatch.setattr(attention.o_proj, "forward", again)
    with pytest.raises(UnsupportedCallError, match="more than once per forward"):
        model(ids)
    monkeypatch.undo()
    assert torch.equal(model(ids).logits, want)


def test_a_thread_that_calls_no_module_has_no_state():
    """The interface asked without the module's own call: no other thread's cache is read."""
    model = patch_model(llama(1), "elu1")
    cache = model(tokens(1, 20)).past_key_values
    query = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    key = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    before = cache.layers[0].state.S.clone()
    with ThreadPoolExecutor(1) as pool, pytest.raises(CacheError, match="2 queries over 3 keys"):
        pool.submit(
            interface.attention, model.model.layers[0].self_attn, query, key, key, is_causal=True
        ).result()
    assert torch.equal(cache.layers[0].state.S, before)
