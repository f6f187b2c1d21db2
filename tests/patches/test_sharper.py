"""Entmax and scores by distance: what they equal, and what they refuse."""

import pytest
import torch
from helpers.score_patches import logits
from helpers.tiny_models import distance, llama

from hf_linattn import patch_model
from hf_linattn.errors import OptionError, UnknownPatchError
from hf_linattn.patches.entmax15 import entmax15
from hf_linattn.patches.scale_invariant import ScaleInvariant
from hf_linattn.patching.discovery import find_sites


def some_scores(*shape, spread=3.0):
    return spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class TestEntmax:
    @pytest.mark.parametrize("spread", [0.0, 1e-3, 3.0, 1e4])
    def test_weights_sum_to_one_and_most_are_zero(self, spread):
        weights = entmax15(some_scores(2, 50, 400, spread=spread))
        assert distance(weights.sum(-1), torch.ones(2, 50)) < 1e-10
        assert (float((weights == 0).double().mean()) > 0.5) == (spread > 1)

    def test_what_is_not_there_gets_nothing(self):
        scores = some_scores(3, 7)
        scores[0] = scores[1, 2:] = -torch.inf
        weights = entmax15(scores.requires_grad_())
        assert weights[0].abs().sum().item() == weights[1, 2:].sum().item() == 0
        assert weights[1].sum().item() == pytest.approx(1)
        weights.square().sum().backward()
        assert scores.grad.isfinite().all()

    def test_the_gradient_is_that_of_differences(self):
        scores = some_scores(4, 9, spread=1.0).requires_grad_()
        assert torch.autograd.gradcheck(entmax15, (scores,))

    def test_two_equal_scores_share(self):
        weights = entmax15(torch.tensor([1.0, 1.0, -9.0]))
        assert weights.tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-6)

    def test_a_learned_scale_starts_as_none(self):
        model = llama()
        assert distance(logits(model, "entmax15", scale="learned"), logits(model, "entmax15")) < 1e-12


class TestScaleInvariant:
    def test_the_score_to_oneself_is_the_original(self):
        model = llama()
        ids = torch.tensor([[5]])
        want = model(ids).logits
        assert distance(patch_model(model, "scale_invariant")(ids).logits, want) < 1e-12

    def test_ranges_of_distance_count_alike(self):
        """Of normal scores, in expectation: exp(m + a^2 / 2) summed from t to 2 t."""
        [site, *_] = find_sites(llama(1))
        modifier, distances = ScaleInvariant(site), torch.arange(1.0, 2e5, dtype=torch.float64)[None, None]
        factor, bias = modifier.score_factor(distances), modifier.score_bias(distances)
        share = (bias + factor.square() / 2).exp()[0, 0, 0]
        totals = [float(share[start : 2 * start].sum()) for start in (1000, 10_000, 90_000)]
        assert totals == pytest.approx([totals[-1]] * 3, rel=0.02)

    def test_far_enough_tau_is_the_original(self):
        model = llama()
        assert distance(logits(model, "scale_invariant", tau=1e12), logits(model)) < 1e-8


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("scale_invariant", {"tau": 0.0}, "tau must be a number of tokens above 0, got 0"),
        ("scale_invariant", {"tau": float("inf")}, "tau must be"),
        ("elu1+scale_invariant", {}, "changes the scores of an attention, and 'elu1' has none"),
        ("entmax15", {"scale": "much"}, "learned"),
    ],
)
def test_bad_options(spec, options, message):
    with pytest.raises(OptionError, match=message):
        patch_model(llama(), spec, options=options)


def test_softpick_says_why_not():
    with pytest.raises(UnknownPatchError, match="trained from the start only"):
        patch_model(llama(), "softpick")
