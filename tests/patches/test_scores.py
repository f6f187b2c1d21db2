"""Other weights, scales and sinks on the scores: what they equal, what they refuse, how far they hold."""

from dataclasses import replace

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.score_patches import learned_of, logits
from helpers.selection import rest_full
from helpers.tiny_models import SIZES, build, distance, llama, tokens

from hf_linattn import available_patches, describe, patch_model
from hf_linattn.errors import OptionError, UnknownPatchError
from hf_linattn.ops import softmax as ops
from hf_linattn.patching.discovery import find_sites
from hf_linattn.registry import find

WEIGHTS = {
    "relu2": ("relu2", {}),
    "relu2, n2": ("relu2", {"over": "n2"}),
    "relu_n": ("relu_n", {}),
    "sigmoid_n": ("sigmoid_n", {}),
    "sigmoid_n, over n": ("sigmoid_n", {"bias": 0.0, "over_n": True}),
    "l2softmax": ("l2softmax", {}),
}
every_weight = pytest.mark.parametrize("name", WEIGHTS)


def patch_of(name, **options):
    """One part, built for a tiny llama's first layer."""
    return find(name)(find_sites(llama(1))[0], **options)


def some_scores(dtype=torch.float64):
    scores = 3 * torch.randn(2, 4, 7, 9, dtype=dtype, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(7, 9, dtype=torch.bool).tril(2)[None, None].repeat(2, 1, 1, 1)
    mask[0, :, 3] = False
    return scores, mask


# -------------------------------------------------------------------------------- equal to others


def test_unscaled_is_scaled_by_the_power_0():
    model = llama()
    assert torch.equal(logits(model, "unscaled"), logits(model, "scaled", exponent=0.0))
    assert distance(logits(model, "unscaled"), logits(model)) > 0.1


def test_scaled_by_the_power_half_is_the_original():
    model = llama()
    assert distance(logits(model, "scaled"), logits(model)) < 1e-12
    assert distance(logits(model, "scaled", exponent=1.0), logits(model)) > 0.01


def test_scaled_puts_the_models_own_factor_aside():
    model = build("GraniteForCausalLM", num_hidden_layers=2, attention_multiplier=0.7, **SIZES)
    assert distance(logits(model, "scaled"), logits(model)) > 0.01


def test_temperature_starts_as_the_original_or_at_its_factor():
    model = llama()  # heads of size 8: twice the usual factor is 8^(-1/6)
    assert distance(logits(model, "temperature"), logits(model)) < 1e-12
    doubled = logits(model, "scaled", exponent=1 / 6)
    assert distance(logits(model, "temperature", init=2.0), doubled) < 1e-6


def test_learned_kappa_starts_as_logn():
    model = llama()
    fixed = logits(model, "logn", train_length=64)
    assert distance(logits(model, "logn", kappa="learned", train_length=64), fixed) < 1e-6
    assert distance(fixed, logits(model)) > 0.01


def test_l2softmax_is_the_root_of_softmax_of_twice_the_scores():
    scores, mask = some_scores()
    got = patch_of("l2softmax").weights(scores, mask, None)
    assert distance(got.square(), ops.softmax_weights(2 * scores, mask, None)) < 1e-12


def test_weights_by_hand():
    scores = torch.tensor([2.0, -1.0, 0.0, 5.0]).view(1, 1, 1, 4)
    mask = torch.tensor([True, True, True, False])

    def row(name, **options):
        return patch_of(name, **options).weights(scores, mask, None).flatten().tolist()

    assert row("relu_n") == pytest.approx([2 / 3, 0, 0, 0])
    assert row("relu_n", power=0) == [2, 0, 0, 0]
    assert row("relu2") == pytest.approx([4 / 3, 0, 0, 0])
    assert row("relu2", over="n2") == pytest.approx([4 / 9, 0, 0, 0])
    assert row("relu2", over=1) == [4, 0, 0, 0]
    assert row("sigmoid_n")[2:] == pytest.approx([1 / 4, 0])
    assert row("sigmoid_n", bias=0.0)[2:] == [0.5, 0]
    assert row("sigmoid_n", bias=0.0, over_n=True)[2:] == pytest.approx([1 / 6, 0])


def test_n_is_the_number_of_visible_keys():
    model = llama()
    short, long = tokens(1, 30), torch.nn.functional.pad(tokens(1, 30), (20, 0), value=5)
    mask = torch.ones_like(long)
    mask[:, :20] = 0
    patch_model(model, "relu2")
    with torch.no_grad():
        padded = model(long, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        assert distance(padded.logits[:, 20:], model(short).logits) < 1e-9


# -------------------------------------------------------------------------------- other models


@pytest.mark.parametrize("spec", ["softmax1", "logn", "softmax1+temperature"])
def test_both_softmaxes_of_a_differential_model_are_patched(spec):
    model = build("DiffLlamaForCausalLM", num_hidden_layers=2, **SIZES)
    with torch.no_grad(), as_oracle(model, spec, learned=learned_of(model, spec)):
        want = model(tokens(2, 40)).logits
    assert distance(logits(model, spec), want) < 1e-9
    assert distance(want, logits(model)) > 0.01 or "temperature" in spec


def test_differential_attention_is_no_patch_and_says_why():
    assert "diff" not in available_patches()
    with pytest.raises(UnknownPatchError, match=r"no patch 'diff'.*two query.*diffllama.*softmax1 and logn"):
        patch_model(llama(1), "diff")


# -------------------------------------------------------------------------------- what is learned


def test_learned_parameters_are_per_query_head():
    model = llama()
    plan = {0: ("softmax1+logn", {"sink": "learned", "kappa": "learned"}), 1: ("temperature", {})}
    patch_model(model, plan)
    own = {name: x.shape for name, x in model.named_parameters() if ".linattn." in name}
    assert {name.partition("linattn.")[2] for name in own} == {
        "softmax1.logit",
        "logn.kappa",
        "temperature.log_factor",
    }
    assert set(own.values()) == {(4,)}
    assert "learned" in str(describe(model))


# -------------------------------------------------------------------------------- limits


@every_weight
def test_rows_that_see_nothing_are_0_with_finite_gradients(name):
    spec, options = WEIGHTS[name]
    scores, mask = some_scores()
    scores[0, :, 3] = float("nan")  # what padded rows may hold
    scores.requires_grad_()
    weights = patch_of(spec, **options).weights(scores, mask, None)
    assert not weights[0, :, 3].any()
    assert not weights.masked_select(~mask).any()
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()


@every_weight
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores_stay_finite(name, size):
    spec, options = WEIGHTS[name]
    scores, mask = some_scores(torch.float32)
    scores = (scores + size).requires_grad_()
    weights = patch_of(spec, **options).weights(scores, mask, None)
    weights.sum().backward()
    assert weights.isfinite().all()
    assert scores.grad.isfinite().all()


@every_weight
def test_a_million_keys_are_counted_exactly_enough(name):
    spec, options = WEIGHTS[name]
    scores = torch.randn(1, 1, 1, 10**6, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 1, 10**6, dtype=torch.bool)
    mask[..., :7] = False
    patch = patch_of(spec, **options)
    want = patch.weights(scores.double(), mask, None)
    got = patch.weights(scores, mask, None)
    assert distance(got / want.sum(), want / want.sum()) < 1e-9
    assert float(got.double().sum() / want.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("relu2", {"over": 0}, 'over must be "n", "n2" or a number above 0, got 0'),
        ("relu2", {"over": float("inf")}, "over must be"),
        ("relu2", {"over": "sqrt"}, "'over' of 'relu2'"),
        ("relu_n", {"power": -0.1}, "power must be from 0 to 2"),
        ("relu_n", {"power": 2.1}, "power must be from 0 to 2"),
        ("sigmoid_n", {"bias": float("nan")}, 'bias must be "-log n" or a number between'),
        ("sigmoid_n", {"bias": 1e29}, 'bias must be "-log n" or a number between -10000 and 10000'),
        ("sigmoid_n", {"bias": "log n"}, "'bias' of 'sigmoid_n'"),
        ("sigmoid_n", {"over_n": True}, "give bias a number"),
        ("softmax1", {"sink": float("inf")}, 'sink must be a finite number or "learned"'),
        ("softmax1", {"sink": "trained"}, "'sink' of 'softmax1'"),
        ("softmax1", {"sink": "learned", "init": float("-inf")}, "init must be a finite number"),
        ("softmax1", {"init": -5.0}, 'give sink="learned" with it'),
        ("logn", {"kappa": 0.0}, 'kappa must be a positive number or "learned", got 0.0'),
        ("logn", {"kappa": 0.2, "train_length": 64}, "say the same thing twice"),
        ("logn", {"kappa": "config"}, "'kappa' of 'logn'"),
        ("temperature", {"init": 0}, "init must be a number above 0"),
        ("scaled", {"exponent": -0.5}, "exponent must be from 0 to 2"),
        ("scaled", {"exponent": 2.5}, "exponent must be from 0 to 2"),
        ("additive", {"hidden": 0}, "hidden must be at least 1, got 0"),
        ("additive", {"seed": -1}, r"seed must be from 0 to 2\^31 - 1, got -1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(spec, options, message):
    with pytest.raises(OptionError, match=message):
        patch_model(llama(1), spec, options=options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax1", {"sink": "learned"}),
        ("logn", {"kappa": "learned"}),
        ("temperature", {}),
        ("additive", {}),
    ],
)
def test_heads_that_cannot_be_told_are_refused(name, options):
    site = replace(find_sites(llama(1))[0], heads=None)
    with pytest.raises(OptionError, match="heads cannot be told"):
        find(name)(site, **options)


@pytest.mark.parametrize("spec", ["unscaled", "scaled"])
def test_factors_of_scores_need_scores(spec):
    with pytest.raises(OptionError, match=f"'{spec}' changes the scores .* 'elu1' has none"):
        patch_model(llama(1), f"elu1+{spec}")


@torch.no_grad()
@pytest.mark.parametrize(
    "spec", rest_full(["relu2+temperature+scaled", "additive"], ["relu2+temperature+scaled"])
)
def test_forward_compiles_as_one_graph(spec):
    torch._dynamo.reset()
    model = patch_model(llama(layers=1), spec)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert distance(compiled(tokens(2, 50)).logits, model(tokens(2, 50)).logits) < 1e-9
    torch._dynamo.reset()
