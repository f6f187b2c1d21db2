"""Linear attentions by feature map: their forms, options, safety, and what the literature says of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_models
from helpers.cases import CASES
from helpers.linear_patches import SHAPE, attention_of, tokens_of
from helpers.properties import CAUSAL, model_of, patch
from helpers.random_inputs import random_qkv, relative_error
from transformers import DynamicCache

from hf_linattn import describe, patch_model
from hf_linattn.attention import LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import find

MAPS = [
    name
    for name, case in CASES.items()
    if "+" not in case.spec
    and issubclass(find(case.spec), LinearAttention)
    and find(case.spec).log_decay is LinearAttention.log_decay
]


def trained(case, dtype=torch.float64, **sizes):
    """The same by case, its weights moved away from where they start."""
    return patch(tiny_models.llama(1, dtype=dtype, **sizes), case).model.layers[0].self_attn.linattn.attention


@pytest.mark.parametrize("name", MAPS)
class TestForms:
    @pytest.fixture(autouse=True)
    def _no_gradients(self):
        with torch.no_grad():
            yield

    def test_recurrent_is_cumulative_sum_is_chunked(self, name):
        attention = trained(name)
        query, key, value = random_qkv(SHAPE)
        tokens = tokens_of(query, key, value)
        chunked, state = attention.causal(tokens, None)
        carried, steps = None, []
        for i in range(tokens.length):
            step, carried = attention.causal(tokens.slice(i, i + 1), carried)
            steps.append(step)
        phi_q = attention.query_map(query)
        phi_k = attention.key_map(key).repeat_interleave(2, 1)
        outer = phi_k[..., :, None] * value.repeat_interleave(2, 1)[..., None, :]
        numerator = (phi_q[..., None] * outer.cumsum(2)).sum(-2)
        if not attention.sum_normalised and (log_scale := attention.query_log_scale(query)) is not None:
            numerator = numerator * log_scale.exp()[..., None]
        total = (phi_q * phi_k.cumsum(2)).sum(-1)
        summed = numerator / attention.denominator(total, tokens.count[:, None]).unsqueeze(-1)
        assert relative_error(torch.cat(steps, 2), summed) < 1e-10
        assert relative_error(chunked, summed) < 1e-10
        assert relative_error(carried.S, state.S) < 1e-12
        assert relative_error(carried.z, state.z) < 1e-12

    def test_denominator_is_the_numerator_of_ones(self, name):
        attention = trained(name)
        query, key, value = random_qkv(SHAPE)
        numerator, total, state = attention.sums(tokens_of(query, key, torch.ones_like(value)), None)
        assert relative_error(numerator, total.unsqueeze(-1).expand_as(numerator)) < 1e-12
        assert relative_error(state.S, state.z.unsqueeze(-1).expand_as(state.S)) < 1e-12

    def test_features_are_as_many_as_it_says(self, name):
        attention = trained(name)
        query, key, _ = random_qkv(SHAPE)
        want = attention.features or SHAPE[4]
        assert attention.query_map(query).shape == (*query.shape[:-1], want)
        assert attention.key_map(key).shape == (*key.shape[:-1], want)

    @pytest.mark.parametrize("size", [0.0, 1e-3, 30.0, 1e4])
    def test_float32_stays_finite_at_any_size(self, name, size):
        attention = trained(name, torch.float32)
        query, key, value = random_qkv(SHAPE, torch.float32)
        for sign in (1, -1):  # all of a row below 0 as well
            tokens = tokens_of(size * sign * query.abs(), size * key, value)
            output, state = attention.causal(tokens, None)
            assert output.isfinite().all()
            assert state.S.isfinite().all()
            if self.averages(attention):
                assert output.abs().max() <= value.abs().max() * 1.01

    def test_64k_tokens_in_float32(self, name):
        few = {"num_attention_heads": 2, "num_key_value_heads": 1}
        attention, exact = (trained(name, dtype, **few) for dtype in (torch.float32, torch.float64))
        exact.load_state_dict(attention.state_dict())
        query, key, value = random_qkv((1, 2, 1, 2**16, 8, 8), torch.float32)
        got = attention.causal(tokens_of(query, key, value), None)[0][:, :, -1:]
        last = tokens_of(query[:, :, -1:].double(), key.double(), value.double())
        last.count = torch.full((1, 1), 2.0**16)
        assert relative_error(got, exact.bidirectional(last)) < 2e-3

    def averages(self, attention):
        return attention.name != "cosine" and getattr(attention, "normalise", "sum") == "sum"


def linear_cases():
    for family, case in CAUSAL:
        if family == "llama" and any(find(part).linear for part in CASES[case].spec.split("+")):
            yield case


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", list(linear_cases()))
def test_described_state_is_the_cache(case, dtype):
    model = patch(model_of("llama", dtype), case)
    cache = DynamicCache(config=model.config)
    model.generate(tiny_models.tokens(3, 40), past_key_values=cache, max_new_tokens=3, do_sample=False)
    for row, layer in zip(describe(model), cache.layers, strict=True):
        assert row.state_bytes * 3 == layer.nbytes


WRONG = [
    ("relu", {"eps": 0.0}, "eps must be between 1e-12 and 1e\\+06, got 0.0"),
    ("relu", {"eps": -1.0}, "eps"),
    ("relu", {"eps": math.inf}, "eps"),
    ("relu", {"eps": math.nan}, "eps"),
    ("relu", {"eps": 1e29}, "eps must be between 1e-12 and 1e"),
    ("taylor2", {"features": 0}, "features must be at least 1, got 0"),
    ("cosine", {"power": -0.1}, "power must be between 0 and 1, got -0.1"),
    ("cosine", {"power": 1.5}, "power"),
    ("cosine", {"power": math.nan}, "power"),
    ("performer", {"features": 0}, "features must be at least 1, got 0"),
    ("performer", {"redraw": -1}, "redraw must be 0 or a number of forwards, got -1"),
    ("performer", {"seed": -1}, "seed must be 0 or more, got -1"),
    ("t2r", {"features": 1}, "features must be at least 2, got 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG, ids=str)
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(OptionError, match=message):
        patch_model(tiny_models.llama(1), name, options=options)


# --------------------------------------------------------------------------------- maps without parameters


def test_relu_without_positive_features_averages_by_the_keys():
    attention = attention_of("relu", eps=0.01)
    _, key, value = random_qkv(SHAPE)
    query = -torch.rand(2, 4, 130, 8, dtype=torch.float64)
    got = attention.bidirectional(tokens_of(query, key, value))
    weights = (key.clamp(min=0) + 0.01).sum(-1, keepdim=True)
    want = (weights * value).sum(2, keepdim=True) / weights.sum(2, keepdim=True)
    assert relative_error(got, want.repeat_interleave(2, 1).expand_as(got)) < 1e-12


@pytest.mark.parametrize("name", ["relu", "t2r", "taylor", "softmax_features"])
def test_gradients_are_finite_where_query_and_key_do_not_meet(name):
    attention = attention_of(name, torch.float32)
    generator = torch.Generator().manual_seed(3)
    query = 40 * torch.randn(1, 4, 20, 8, generator=generator)
    key = -query[:, ::2]  # opposed, as far apart as can be
    value = torch.randn(1, 2, 20, 8, generator=generator)
    query.requires_grad_()
    key.requires_grad_()
    attention.causal(tokens_of(query, key, value), None)[0].square().sum().backward()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_taylor_where_every_key_opposes_the_query(dtype):
    query, _, value = random_qkv((1, 4, 4, 50, 8, 8), dtype)
    query = query[:, :, :1].expand(-1, -1, 50, -1)
    output, _ = attention_of("taylor", dtype).causal(
        tokens_of(query, -3 * query[:, ::2], value[:, ::2]), None
    )
    assert output.isfinite().all()
    assert output.abs().max() <= 2 * value.abs().max()


def test_taylor_is_exp_to_first_order_of_the_cosine():
    attention = attention_of("taylor")
    query, key, _ = random_qkv((1, 2, 2, 30, 8, 8))
    weights = attention.query_map(query) @ attention.key_map(key).mT
    cos = F.cosine_similarity(query[:, :, :, None], key[:, :, None], dim=-1)
    assert float((weights - 1 - cos).abs().max()) < 1e-13
    assert float((weights - cos.exp()).abs().max()) < math.e - 2 + 1e-13


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_cosine_over_a_power_of_the_visible_keys(power):
    attention = attention_of("cosine", power=power)
    query, key, value = random_qkv((1, 4, 4, 70, 8, 8))
    key, value = key[:, ::2], value[:, ::2]
    got, _ = attention.causal(tokens_of(query, key, value), None)
    cos = F.cosine_similarity(query[:, :, :, None], key.repeat_interleave(2, 1)[:, :, None], dim=-1).tril()
    n = torch.arange(1, 71, dtype=torch.float64)[:, None]
    assert relative_error(got, cos @ value.repeat_interleave(2, 1) / n**power) < 1e-12


def test_cosine_counts_visible_keys_alone():
    model = patch_model(tiny_models.llama(1), "cosine", options={"power": 1.0})
    ids, mask = tiny_models.left_padded(tiny_models.tokens(1, 30), 10)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=tiny_models.positions(mask)).logits[:, 10:]
        alone = model(ids[:, 10:]).logits
    assert tiny_models.distance(padded, alone) < 1e-6


# -------------------------------------------------------------------------------------------------- taylor2


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_taylor2_features_multiply_to_the_polynomial(size):
    attention = attention_of("taylor2", features=size)
    query, key, _ = random_qkv((1, 4, 4, 20, 8, 8))
    used = min(size, 8)
    assert attention.features == 1 + used + used * (used + 1) // 2
    got = attention.query_map(query) @ attention.key_map(key[:, ::2]).repeat_interleave(2, 1).mT
    x, y = query, key[:, ::2].repeat_interleave(2, 1)
    if size < 8:
        x = torch.einsum("bhnd,hfd->bhnf", x, attention.query_weight)
        y = torch.einsum("bhnd,hfd->bhnf", y, attention.key_weight.repeat_interleave(2, 0))
    s = x @ y.mT / used**0.5
    assert float((got - 1 - s - s**2 / 2).abs().max()) < 1e-11
    assert float(got.min()) >= 0.5 - 1e-12
    # Based's own features, all products: the same kernel from almost twice as many
    full = [
        torch.cat(
            [
                torch.ones_like(z[..., :1]),
                z / used**0.25,
                (z[..., None] * z[..., None, :]).flatten(-2) / 2**0.5 / used**0.5,
            ],
            -1,
        )
        for z in (x, y)
    ]
    assert float((got - full[0] @ full[1].mT).abs().max()) < 1e-11


@torch.no_grad()
def test_taylor2_starts_near_the_scores_of_softmax():
    model = tiny_models.llama(1, head_dim=64, hidden_size=64)
    attention = patch_model(model, "taylor2").model.layers[0].self_attn.linattn.attention
    query, key, _ = random_qkv((1, 4, 4, 300, 64, 64))
    key = query[:, ::2]
    x = torch.einsum("bhnd,hfd->bhnf", query[:, ::2], attention.query_weight[::2])
    y = torch.einsum("bhnd,hfd->bhnf", key, attention.key_weight)
    got, want = (x * y).sum(-1) / 16**0.5, (query[:, ::2] * key).sum(-1) / 64**0.5
    assert abs(float(got.mean() / want.mean()) - 1) < 0.05
    assert attention.features == 153


# --------------------------------------------------------------------------------------------- learned maps


def test_hedgehog_starts_as_the_softmaxes_of_both_signs():
    attention = attention_of("hedgehog", torch.float32)
    query, key, _ = random_qkv(SHAPE, torch.float32)
    for x, got in ((query, attention.query_map(query)), (key, attention.key_map(key))):
        assert torch.allclose(got, torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))


def test_t2r_starts_with_directions_and_their_opposites():
    torch.manual_seed(1)
    attention = attention_of("t2r", torch.float32, features=8)
    weight = attention.weight.detach()
    assert torch.equal(weight[:, :4], -weight[:, 4:])
    assert torch.allclose(weight[0, :4] @ weight[0, :4].T, torch.eye(4), atol=1e-6)
    assert not attention.bias.any()
    query, _, _ = random_qkv(SHAPE, torch.float32)
    assert float(attention.query_map(query).detach().amax(-1).min()) > 1e-3  # no query without a feature


@pytest.mark.parametrize("name", ["t2r", "taylor2"])
def test_learned_maps_start_by_the_seed_of_torch_and_leave_it_alone(name):
    def weights(seed):
        model = tiny_models.llama(2)
        torch.manual_seed(seed)
        patch_model(model, name, options={"features": 4})
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(1), after)
        return [x for key, x in model.state_dict().items() if "linattn" in key and "bias" not in key]

    first, again, other = weights(1), weights(1), weights(2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0], first[len(first) // 2])  # layers differ


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("case", ["t2r", "hedgehog", "taylor2, projected"])
def test_every_learned_weight_trains(name, case):
    model = patch(model_of(name, torch.float32), case)
    model(tiny_models.tokens(2, 30)).logits.square().mean().backward()
    weights = {key: x for key, x in model.named_parameters() if ".linattn." in key}
    assert len(weights) == 2 * 2
    for key, weight in weights.items():
        assert weight.grad.abs().sum() > 0, key
