"""Other implementations beside ours: checked before they are timed, missing ones and failing ones say so."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from hf_linattn.eval.bench import peers, roofline
from hf_linattn.eval.bench.candidates import random_inputs
from hf_linattn.eval.bench.config import BenchConfig, parse_shape
from hf_linattn.eval.bench.operator import OperatorSeries
from hf_linattn.eval.bench.series import Limits


def performer(function):
    package = types.ModuleType("performer_pytorch")
    inner = types.ModuleType("performer_pytorch.performer_pytorch")
    inner.causal_linear_attention_noncuda = function
    return {"performer_pytorch": package, "performer_pytorch.performer_pytorch": inner}


def numerator(query, key, value):
    return (query @ key.mT).tril() @ value


def right(query, key, value):
    return numerator(query, key, value) / (query @ key.mT).tril().sum(-1, keepdim=True)


PEER_CONFIG = BenchConfig(parse_shape("1x4/2x8"), "train", 64)


@pytest.fixture
def no_peers(monkeypatch):
    for name in ("fla", "fast_transformers", "performer_pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(peers.torch, "compile", lambda function, **options: function)


def test_peers_that_are_not_installed_say_so(no_peers):
    found, notes = peers.candidates(PEER_CONFIG)
    assert [each.name for each in found] == ["torch.compile"]
    assert "torch.compile" not in notes  # it computes what we do
    assert notes["fla"].startswith("its kernels run on CUDA only")
    assert notes["fla-naive"] == "not installed: pip install flash-linear-attention"
    assert notes["fast-transformers"] == "not installed: pip install pytorch-fast-transformers"
    assert notes["performer"] == "not installed: pip install performer-pytorch"


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (right, None),
        (numerator, "computes something else: elu1 without its normaliser"),
        (lambda q, k, v: numerator(q, k, v) * 8**-0.5, "without its normaliser, times 1/sqrt(D)"),
        (lambda q, k, v: right(q, k, v).roll(1, 2), "away from elu1's"),
        (lambda q, k, v: v[:, :, :3], "inf away"),
    ],
)
def test_peers_are_checked_before_they_are_timed(no_peers, monkeypatch, function, note):
    for name, module in performer(function).items():
        monkeypatch.setitem(sys.modules, name, module)
    found, notes = peers.candidates(BenchConfig(PEER_CONFIG.shape, "prefill", 64))
    assert "performer" in [each.name for each in found]
    assert note in notes["performer"] if note else "performer" not in notes


def test_a_peer_that_fails_is_a_note(no_peers, monkeypatch):
    def fails(query, key, value):
        raise AssertionError("0 active drivers\nmore")

    for name, module in performer(fails).items():
        monkeypatch.setitem(sys.modules, name, module)
    found, notes = peers.candidates(PEER_CONFIG)
    assert notes["performer"] == "failed: AssertionError: 0 active drivers"
    assert "performer" not in [each.name for each in found]

    def later(query, key, value):  # no gradients: fails in training, not in the check
        return right(query, key, value).detach()

    for name, module in performer(later).items():
        monkeypatch.setitem(sys.modules, name, module)
    names = ["fla", "performer", "torch.compile"]
    ceiling = roofline.Ceiling(1.0, 1.0)
    series = OperatorSeries(PEER_CONFIG, ["elu1"], {}, Limits(1, 0.0), ceiling, peers=names)
    rows = {row["candidate"]: row for row in series.run(64)}
    assert rows["performer"]["note"].startswith("failed: RuntimeError")
    assert rows["torch.compile"]["measured"]
    assert series.notes["fla"]


def test_the_form_given_to_the_compiler_is_right_at_ragged_lengths():
    for length in (1, 63, 64, 65, 200):
        config = BenchConfig(parse_shape("2x2x8x6"), "prefill", length, True, "float64")
        tensors = random_inputs(config)
        phi_q, phi_k = (F.elu(x) + 1 for x in (tensors.query, tensors.key))
        output = peers.vectorised(phi_q, phi_k, tensors.value)
        torch.testing.assert_close(output, right(phi_q, phi_k, tensors.value).transpose(1, 2))


def test_peers_stand_beside_causal_prefill_and_training_only(no_peers):
    for kind, causal in (("decode", True), ("prefill", False)):
        assert peers.candidates(BenchConfig(PEER_CONFIG.shape, kind, 64, causal)) == ([], {})
    found, notes = peers.candidates(PEER_CONFIG, names=["performer"])
    assert found == []
    assert list(notes) == ["performer"]
