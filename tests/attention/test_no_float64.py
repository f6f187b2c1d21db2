"""Apple's GPUs have no float64: nothing that runs on the model's device asks for it."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_models
from helpers.no_float64 import NoFloat64, OnDevice

from hf_linattn import available_patches, patch_model
from hf_linattn.eval.bench import peers
from hf_linattn.eval.bench.config import BenchConfig, Shape
from hf_linattn.eval.layers import measure as layers
from hf_linattn.eval.perplexity import measure as perplexity

OPTIONS = {"window+gated": {"size": 8, "sinks": 2}, "h2o": {"size": 8}, "logn": {"train_length": 8}}
BIDIRECTIONAL = {"linformer", "power"}


@pytest.mark.parametrize("spec", sorted({*available_patches(), "window+gated"} - BIDIRECTIONAL))
def test_attention(meta, monkeypatch, spec):
    monkeypatch.setattr("hf_linattn.patches.sandwich.NO_FLOAT64", ("meta",))
    model = patch_model(tiny_models.llama(1), spec, options=OPTIONS.get(spec)).float().to(meta)
    ids = torch.zeros(2, 20, dtype=torch.long, device=meta)
    with NoFloat64():
        model(ids, use_cache=True).logits.sum().backward()  # with a cache transformers looks for no documents
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            assert model(ids[:, :1], past_key_values=cache).logits.is_meta


def test_measures():
    generator = torch.Generator().manual_seed(0)
    nats = torch.rand(2, 12, generator=generator)
    edges = [0, 4, 12]
    expected = torch.stack([nats[:, :4].double().sum(1), nats[:, 4:].double().sum(1)], 1).tolist()
    with pytest.raises(TypeError, match="float64"):
        nats.as_subclass(OnDevice).double()
    assert perplexity._bucket_sums(nats.as_subclass(OnDevice), edges) == expected
    sums = [0.0, 0.0]
    perplexity._add_by_position(sums, edges, 0, nats[0].as_subclass(OnDevice))
    assert sums == expected[0]
    logits, other = (torch.randn(2, 5, 7, generator=generator) for _ in range(2))
    targets = torch.randint(7, (2, 5), generator=generator)
    found = layers._sums(*(x.as_subclass(OnDevice) for x in (logits, other, targets)))
    assert found == layers._sums(logits, other, targets)


def test_peers_are_judged_on_the_cpu(monkeypatch):
    made = peers.random_inputs

    def elsewhere(*about):
        tensors = made(*about)
        return replace(tensors, **{name: getattr(tensors, name).as_subclass(OnDevice) for name in three})

    three = ("query", "key", "value")
    monkeypatch.setattr(peers, "random_inputs", elsewhere)
    config = BenchConfig(Shape(1, 2, 2, 8, 8), "prefill", 16, True, "float32", "cpu")

    def elu1(query, key, value):
        weights = (query @ key.mT).tril()
        return (weights @ value / weights.sum(-1, keepdim=True)).transpose(1, 2)

    assert peers._agreement(elu1, config, 0) == ""
