"""Calls of a patch by itself, without a model around it."""

import torch

from helpers.properties import model_of
from hf_linattn.attention import Call
from hf_linattn.attention.visibility import Visibility
from hf_linattn.patching.discovery import find_sites
from hf_linattn.registry import find


def made(name, family="llama", layer=0, **options):
    """A patch as a module in float64, of the sizes of a tiny model: 4 heads of 8, two of them a key."""
    return find(name)(find_sites(model_of(family))[layer], **options).double()


def call(n, causal=True, heads=4, kv_heads=2, seed=0, valid=None, **fields):
    """Random queries, keys and values of n tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"query": (2, heads, n, 8), "key": (2, kv_heads, n, 8), "value": (2, kv_heads, n, 8)}
    drawn = {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in sizes.items()}
    visibility = Visibility(causal, n, n, documents=None if valid is None else valid.long())
    defaults = {"visibility": visibility, "causal": causal, "cross": False, "scaling": 8**-0.5}
    return Call(**{**drawn, **defaults, "where": "layer", "spec": "patch", **fields})


def weights(patch, given):
    """W with o = W v, by one-hot values."""
    n = given.key.shape[2]
    given.value = torch.eye(n, dtype=torch.float64).expand(2, given.key.shape[1], n, n)
    return patch(given)[0]


def seen(patch, given):
    """Which keys have any weight, for the first head of the first row."""
    return [row.nonzero()[:, 0].tolist() for row in weights(patch, given)[0, 0]]
