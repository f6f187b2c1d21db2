"""What every cache of constant size that chooses its tokens keeps to: size, order of rows, static caches."""

from itertools import pairwise

import torch
from transformers import DynamicCache, StaticCache

from helpers import tiny_models
from helpers.holes import CUTS, HOLES, WIDTH, rows, run
from helpers.properties import close, logits
from hf_linattn import describe


@torch.no_grad()
def check_memory_is_flat_and_told(model):
    cache = DynamicCache()
    told, sizes = describe(model).state_bytes, set()
    for first, last in pairwise((0, 1, 30, 31, 130)):
        model(tiny_models.tokens(1, 130)[:, first:last], past_key_values=cache)
        sizes.add(sum(layer.nbytes for layer in cache.layers))
    assert sizes == {told}


@torch.no_grad()
def check_rows_change_places_and_tokens_are_taken_back(model):
    ids = tiny_models.tokens(3, 80)
    want, cache, order = logits(model, ids), DynamicCache(), torch.tensor([2, 2, 0])
    model(ids[:, :50], past_key_values=cache)
    cache.activate_past_recording()
    for step in range(50, 70):  # a block leaves in between
        model(ids[:, step : step + 1].roll(1, 0), past_key_values=cache)
    cache.crop(-18)
    cache.crop(-2)
    cache.reorder_cache(order)
    got = model(ids[order, 50:], past_key_values=cache).logits
    close(got, want[order, 50:], 1e-9)


def check_static_caches_and_compiled_code(model):
    """A block of the first row leaves its window in compiled code."""
    want = run(model, rows(), CUTS["one shot"])
    cache = StaticCache(model.config, WIDTH)
    close(run(model, rows(), CUTS["prefill, decode"], cache)[HOLES == 1], want[HOLES == 1], 1e-9)
    cache.reset()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run(model, rows(), (0, 25, 26), cache)
    found = run(compiled, rows(), range(26, 32), cache)
    close(found[HOLES[:, 26:31] == 1], want[:, 26:31][HOLES[:, 26:31] == 1], 1e-9)
    torch._dynamo.reset()
