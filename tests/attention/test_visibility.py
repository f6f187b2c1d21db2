"""Compact masks against transformers' own boolean masks, over every pattern that has a compact form."""

import itertools

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, StaticCache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)

from hf_linattn.attention.masks import is_compact
from hf_linattn.attention.visibility import Visibility, analyse, read_visibility
from hf_linattn.errors import UnsupportedMaskError

MAKERS = {
    "causal": create_causal_mask,
    "sliding": create_sliding_window_causal_mask,
    "chunked": create_chunked_causal_mask,
    "bidirectional": create_bidirectional_mask,
    "bidirectional window": create_bidirectional_sliding_window_mask,
}
PADDING = {
    "none": None,
    "left": [[0] * 5 + [1] * 7, [1] * 12],
    "right": [[1] * 9 + [0] * 3, [1] * 12],
    "hole": [[1, 1, 0, 0] + [1] * 8, [0, 1] * 6],
    "ones": [[1] * 12, [1] * 12],
    "nothing": [[0] * 12, [1] * 12],
}


def full_mask(*args, **kwargs):
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, **kwargs)


ALL_MASK_ATTENTION_FUNCTIONS.register("full_mask_for_tests", full_mask)


def both(kind, padding, queries=12, position_ids=None, cache=None):
    """The mask as this package reads it, and transformers' own picture of it."""
    cls = MistralConfig if "window" in kind or kind == "sliding" else LlamaConfig
    config = cls(sliding_window=4) if cls is MistralConfig else cls(attention_chunk_size=5)
    embeds = torch.zeros(2, queries, 8)
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding])
    extra = {} if "bidirectional" in kind else {"position_ids": position_ids}
    masks = []
    for name in ("linattn", "full_mask_for_tests"):
        config._attn_implementation = name
        masks.append(MAKERS[kind](config, embeds, mask, past_key_values=cache, **extra))
    return masks


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", MAKERS)
def test_compact_mask_means_the_same(kind, padding):
    compact, full = both(kind, padding)
    assert is_compact(compact)
    visibility = read_visibility(compact, 12, 12, is_causal=True)
    got, want = torch.broadcast_tensors(visibility.mask(full.device), full)
    assert torch.equal(got, want)
    assert torch.equal(*torch.broadcast_tensors(visibility.count(full.device), want.sum(-1).float()))
    if padding in ("none", "ones"):
        assert visibility.documents is None or visibility.window is not None
        assert visibility.plain == ("sliding" not in kind and "window" not in kind and "chunked" not in kind)


@pytest.mark.parametrize("kind", ["causal", "sliding"])
def test_packed_documents(kind):
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)])[None]
    compact, full = both(kind, "none", position_ids=positions)
    assert is_compact(compact)
    visibility = read_visibility(compact, 12, 12, is_causal=True)
    got, want = torch.broadcast_tensors(visibility.mask(full.device), full)
    assert torch.equal(got, want)
    assert torch.equal(*torch.broadcast_tensors(visibility.count(full.device), want.sum(-1).float()))


@pytest.mark.parametrize(
    ("kind", "padding", "queries", "static"),
    list(
        itertools.product(["causal", "sliding", "chunked"], ["none", "left", "hole"], [1, 5], [False, True])
    ),
)
def test_masks_with_a_cache(kind, padding, queries, static):
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    cache = StaticCache(config=config, max_cache_len=20) if static else DynamicCache(config=config)
    past = 12 - queries
    cache.update(torch.zeros(2, 1, past, 8), torch.zeros(2, 1, past, 8), 0)
    compact, full = both(kind, padding, queries, cache=cache)
    assert is_compact(compact)
    visibility = read_visibility(compact, queries, compact.shape[-1], is_causal=True)
    got, want = torch.broadcast_tensors(visibility.mask(full.device), full)
    assert torch.equal(got, want)
    assert torch.equal(*torch.broadcast_tensors(visibility.count(full.device), want.sum(-1).float()))
    plain = kind == "causal" and padding == "none" and queries == 1
    assert visibility.sees_all() == (plain and not static)  # the static cache has 8 keys to come
    assert not visibility.sees_all() or bool(full.all())


def test_a_mask_reader_that_drops_padding_is_noticed(monkeypatch):
    compact, full = both("causal", "left")
    monkeypatch.setattr(Visibility, "_same", lambda self, documents: documents[:, None, :, None] == -1)
    got = read_visibility(compact, 12, 12, is_causal=True).mask(full.device)
    assert not torch.equal(*torch.broadcast_tensors(got, full))


def dense(mask):
    return Visibility(True, mask.shape[-2], mask.shape[-1], dense=mask)


@pytest.mark.parametrize("padding", ["none", "left", "right", "hole", "nothing"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_analyse_recognises_plain_patterns_from_their_picture(kind, padding):
    _, full = both(kind, padding)
    found = analyse(dense(full), 0)
    assert found.dense is None
    rows = full.any(-1)
    got, want = torch.broadcast_tensors(found.mask(full.device), full)
    assert torch.equal(got[:, 0][rows[:, 0]], want[:, 0][rows[:, 0]])


def test_analyse_recognises_documents():
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    _, full = both("causal", "none", position_ids=positions)
    found = analyse(dense(full), 0)
    assert torch.equal(found.mask(full.device).expand_as(full), full)


@pytest.mark.parametrize("what", ["window", "prefix", "heads", "islands"])
def test_analyse_refuses_everything_else(what):
    mask = torch.ones(1, 2, 12, 12, dtype=torch.bool).tril()
    if what == "window":
        mask &= ~mask.tril(-4)
    elif what == "prefix":
        mask[..., :4, :4] = True
    elif what == "heads":
        mask[:, 1, 5, 3] = False
    else:
        mask[..., 3:6, 3:6] = True
    with pytest.raises(UnsupportedMaskError, match=r"cannot express|differs between heads"):
        analyse(dense(mask), 0)


def test_analyse_refuses_added_values():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    bias = torch.full((1, 1, 4, 4), 0.5).masked_fill(~mask, torch.finfo(torch.float32).min)
    with pytest.raises(UnsupportedMaskError, match="adds values"):
        analyse(read_visibility(bias, 4, 4, is_causal=True), 0)


def test_layers_with_windows_of_their_own_count_for_themselves():
    """A decoded token's count is shared by the layers that have the same mask, and by no others."""
    mask = torch.arange(-9, 1)[None, None, None].contiguous()
    visibility = Visibility(True, 1, 10, mask)
    for size in (4, 7, 4):
        assert visibility.windowed(size, mask.device).count(mask.device).item() == size
    assert visibility.count(mask.device).item() == 10
