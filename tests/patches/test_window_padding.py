"""Padding inside a row moves nothing behind a window: each row equals its own tokens alone, in float64."""

from itertools import pairwise

import pytest
import torch
from helpers import tiny_models
from helpers.holes import CUTS, HOLES, WIDTH, alone, rows, run
from helpers.oracle import as_oracle
from helpers.properties import close, learned, logits, model_of
from transformers import DynamicCache, StaticCache

from hf_linattn import patch_model, unpatch_model

SIZE = 6
SPECS = {
    "window": {},
    "sinks": {"sinks": 3, "positions": "text"},
    "window+elu1": {},
    "window+elu1, learned": {"sinks": 2, "mix": "learned", "positions": "text"},
    "window+hedgehog": {"sinks": 1, "positions": "text"},
    "window+logn": {},
    "nope+window+elu1": {},
}


def patched(family, spec, dtype=torch.float64):
    """A patched model, the oracle's name of its patch, and its options."""
    model, options = model_of(family, dtype), {"size": SIZE, **SPECS.get(spec, {})}
    name = "window" if spec == "sinks" else spec.split(",")[0]
    return patch_model(model, name, options={"window": options}), name, options


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_row_is_its_tokens_alone_by_the_formula(family, spec):
    if "nope" in spec and family != "llama":
        pytest.skip("no rotary embedding to switch off")
    model, name, options = patched(family, spec)
    found = {cuts: run(model, rows(), CUTS[cuts]) for cuts in CUTS if cuts == "one shot" or family != "bert"}
    weights = learned(model)
    unpatch_model(model)
    with as_oracle(model, name, learned=weights, **options):
        want = alone(model, rows())
    for got in found.values():
        close(got[HOLES == 1], want, 1e-9)


@pytest.mark.parametrize("spec", ["window+gated", "window+decay", "window+t2r", "turned sinks"])
def test_what_has_no_formula_of_its_own_here_equals_itself_without_padding(spec):
    model = model_of("llama")
    options = {"size": SIZE} if "+" in spec else {"size": SIZE, "sinks": 3, "positions": "cache"}
    patch_model(model, spec if "+" in spec else "window", options={"window": options})
    want = alone(model, rows())
    for cuts in CUTS.values():
        close(run(model, rows(), cuts)[HOLES == 1], want, 1e-9)


@pytest.mark.parametrize("spec", ["window", "window+elu1", "window+gated", "window+hedgehog", "sinks"])
def test_kernels_in_cpp(spec, compiled):
    """A token at a time, the C++ kernel has a column for each row."""
    want = alone(patched("llama", spec)[0], rows())
    model = patched("llama", spec, torch.float32)[0]
    for cuts in CUTS.values():
        close(run(model, rows(), cuts)[HOLES == 1], want, 1e-4)


def test_static_caches_and_compiled_code():
    options = {"size": SIZE, "sinks": 2}
    model = patch_model(tiny_models.llama(1), "window+elu1", options={"window": options})
    want = alone(model, rows())
    cache = StaticCache(model.config, WIDTH)
    close(run(model, rows(), CUTS["prefill, decode"], cache)[HOLES == 1], want, 1e-9)
    cache.reset()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = [
        run(each, rows(), cuts, cache) for each, cuts in ((model, (0, 4, 5)), (compiled, (5, 26, 47, 48)))
    ]
    close(torch.cat(found, 1)[HOLES == 1], want, 1e-9)
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("spec", ["window+elu1", "sinks"])
def test_rows_change_places_and_tokens_are_taken_back(spec):
    model, ids = patched("llama", spec)[0], rows()
    want = torch.stack(
        [logits(model, row[None], mask[None])[0] for row, mask in zip(ids, HOLES, strict=True)]
    )
    positions, cache, order = tiny_models.positions(HOLES), DynamicCache(), torch.tensor([2, 2, 0, 1])

    def step(first, last, rows=slice(None), tokens=ids):
        mask = HOLES[rows]
        return model(
            tokens[rows, first:last],
            attention_mask=mask[:, :last],
            position_ids=positions[rows, first:last],
            past_key_values=cache,
        ).logits

    step(0, 30)
    step(30, 31)
    cache.activate_past_recording()
    step(31, 33, tokens=ids + 1)
    step(33, 34, tokens=ids + 1)
    cache.crop(-3)
    cache.reorder_cache(order)
    got = torch.cat([step(31, 32, order), step(32, 40, order), step(40, 41, order)], 1)
    seen = HOLES[order, 31:41] == 1
    close(got[seen], want[order, 31:41][seen], 1e-9)


@torch.no_grad()
def test_packed_documents_with_padding_inside():
    model, ids = patched("llama", "window+elu1")[0], tiny_models.tokens(1, 40)
    mask = torch.ones_like(ids)
    mask[0, [0, 4, 5, 6, 11, 30, 31]] = 0
    borders = torch.tensor([0, 18, 40], dtype=torch.int32)
    parts = [torch.arange(*pair)[mask[0, slice(*pair)] == 1] for pair in pairwise(borders.tolist())]
    positions = torch.zeros_like(ids)
    for part in parts:
        positions[0, part] = torch.arange(len(part))
    lengths = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 22, "max_length_k": 22}
    got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False, **lengths).logits
    for part in parts:
        close(got[:, part], logits(model, ids[:, part]), 1e-9)


def test_gradients_are_those_of_the_tokens_alone():
    model, ids = patched("llama", "window+hedgehog")[0], rows()

    def gradients(loss):
        model.zero_grad()
        loss.square().sum().backward()
        return {name: x.grad.clone() for name, x in model.named_parameters()}

    got = gradients(logits(model, ids, HOLES)[HOLES == 1])
    each = [logits(model, row[mask == 1][None])[0] for row, mask in zip(ids, HOLES, strict=True)]
    for name, want in gradients(torch.cat(each)).items():
        close(got[name], want, 1e-9)


@torch.no_grad()
def test_generating_behind_padding_in_the_middle():
    """A chat whose turns were padded: the continuation of the tokens alone."""
    model, ids, holes = patched("llama", "window+elu1")[0], rows()[:, :39], HOLES[:, :39]
    more = model.generate(ids, attention_mask=holes, max_new_tokens=12, do_sample=False)[:, 39:]
    for row, mask, found in zip(ids, holes, more, strict=True):
        single = row[mask == 1][None]
        want = model.generate(
            single, attention_mask=torch.ones_like(single), max_new_tokens=12, do_sample=False
        )
        assert found.tolist() == want[0, single.shape[1] :].tolist()
