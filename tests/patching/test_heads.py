"""Heads that processes share, in one process: each patch at half of its heads, and what is refused."""

import copy

import pytest
import torch
from helpers import learned_patches
from helpers.cases import CASES
from helpers.properties import model_of, patch, serves
from helpers.tiny_models import distance, llama, tokens
from torch import nn

from hf_linattn import is_patched, patch_model
from hf_linattn.attention import Modifier
from hf_linattn.errors import UnsupportedCallError, UnsupportedModelError
from hf_linattn.parallel import Shard
from hf_linattn.patching import heads
from hf_linattn.patching.discovery import find_sites
from hf_linattn.patching.patch import share_heads

DROPPED = "'power' drops tokens by the attention of all heads together"


@pytest.fixture
def split(monkeypatch):
    """Models seem to have their heads shared by two processes, of which this is the one with this number."""

    def become(rank, size=2):
        monkeypatch.setattr(heads, "processes_of", lambda model: Shard(rank, size, None))
        monkeypatch.setattr(heads, "_is_shared", lambda model, site: True)
        monkeypatch.setattr(Shard, "spread", lambda shard, x: None)

    return become


@torch.no_grad()
def calls_of(model, ids):
    """What each patch of a model is called with, and what it gives."""
    found = []

    def note(child, args, output):
        found.append((child, args, output[0]))

    hooks = [m.linattn.register_forward_hook(note) for m in model.modules() if "linattn" in m._modules]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case != "softmax"])
@torch.no_grad()
def test_a_process_computes_its_heads_as_they_are_among_all(split, case):
    family = "llama" if serves("llama", case) else "bert"
    model = patch(model_of(family), case)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    calls = calls_of(model, tokens(2, 40))
    if CASES[case].spec == "power":
        split(0)
        with pytest.raises(UnsupportedModelError, match=DROPPED):
            share_heads(model)
        return
    assert calls
    for rank in range(2):
        split(rank)
        share_heads(model)
        for child, (context, *qkv, mask, scaling, dropout, causal, extras), whole in calls:
            own = [x.chunk(2, 1)[rank] for x in qkv]
            mask = copy.copy(mask)  # some note on it what they found
            got = child(context, *own, mask, scaling, dropout, causal, extras)[0]
            assert distance(got, whole.chunk(2, 2)[rank]) < 1e-12
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_weights_are_whole_again_behind_a_call_that_fails(split):
    model = patch_model(llama(1), "hedgehog+temperature")
    split(1)
    share_heads(model)
    child = model.model.layers[0].self_attn.linattn
    before = dict(child.named_parameters())
    with pytest.raises(UnsupportedCallError, match="2 and 1 for keys should be here, and there are 4 and 2"):
        model(tokens(1, 5))
    query, key = torch.zeros(1, 2, 5, 8), torch.zeros(1, 1, 5, 8)
    call = child.head_share.in_place(query, key)
    call.__enter__()
    assert child.temperature.log_factor.shape == (2,)
    assert not call.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert child.temperature.log_factor.shape == (4,)
    assert all(child.get_parameter(name) is weight for name, weight in before.items())


def test_what_a_patch_notes_in_a_call_stays(split):
    model = patch_model(llama(1), "performer", options={"redraw": 2}).train()
    [(child, (context, *qkv, mask, scaling, dropout, causal, extras), _)] = calls_of(model, tokens(1, 9))
    split(0)
    share_heads(model)
    before = child.performer.projection.clone()
    child(context, *(x.chunk(2, 1)[0] for x in qkv), mask, scaling, dropout, causal, extras)
    assert child.performer.step == 2
    assert not torch.equal(child.performer.projection, before)


class Numbered(Modifier):
    """Scores fall by the number of the head."""

    def __init__(self, site):
        super().__init__(site)
        self.count = site.heads

    def score_bias(self, distance):
        return -torch.arange(self.count, dtype=distance.dtype)[:, None, None] * distance[:, None]


class Behind(Modifier):
    """A weight whose heads are behind another dimension."""

    def __init__(self, site):
        super().__init__(site)
        self.weight = nn.Parameter(torch.zeros(3, site.heads))

    def output(self, call, output):
        return output


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Numbered, r"'mine' goes by their number \(count\): its class does not say that it takes_own_heads"),
        (Behind, r"which part of mine.weight \[3, 4\] belongs to a head cannot be told"),
    ],
)
def test_patches_that_heads_cannot_be_cut_out_of(split, cls, message):
    split(0)
    model, ids = llama(1), tokens(1, 9)
    before, keys = model(ids).logits, set(model.state_dict())
    with learned_patches.registered(cls, "mine"), pytest.raises(UnsupportedModelError, match=message):
        patch_model(model, "mine")
    assert not is_patched(model)
    assert set(model.state_dict()) == keys
    assert torch.equal(model(ids).logits, before)


def test_heads_that_do_not_divide(split):
    split(0, size=3)
    with pytest.raises(UnsupportedModelError, match="3 processes cannot share 4 heads"):
        patch_model(llama(1), "elu1")


@pytest.mark.parametrize(
    ("style", "shared"), [("colwise", True), ("colwise_gather_output", False), ("rowwise", False)]
)
def test_a_plan_says_whether_heads_are_shared(style, shared):
    model = llama(1)
    [site] = find_sites(model)
    model._tp_plan = {"model.layers.*.self_attn.q_proj": style, "model.layers.*.mlp.up_proj": "colwise"}
    assert heads._is_shared(model, site) == shared
