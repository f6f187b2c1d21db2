"""The delta rule: its chunks against the recurrence, its ends, its gates, and what it refuses."""

import math

import pytest
import torch
from helpers import tiny_models
from helpers.linear_patches import attention_of
from helpers.properties import model_of
from torch.nn.functional import normalize

from hf_linattn import describe, patch_model
from hf_linattn.errors import OptionError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.ops.eager import delta_rule


def inputs_of(length, channels=1, dtype=torch.float64, heads=(4, 2), size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(2, *shape, generator=generator, dtype=dtype)

    query, key = random(heads[0], length, size), normalize(random(heads[1], length, size), dim=-1)
    log_decay = -0.2 * random(heads[1], length, channels).abs()
    return query, key, random(heads[1], length, 5), 2 * random(heads[1], length).sigmoid(), log_decay


def recurrence(query, key, value, beta, log_decay, state=None, documents=None):
    """S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, as the papers write it, token by token."""
    size, groups = key.shape[-1], query.shape[1] // key.shape[1]
    S = key.new_zeros(*key.shape[:2], value.shape[-1], size) if state is None else state.mT
    outputs = []
    for t in range(key.shape[2]):
        if documents is not None and t:
            S = S * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        k, v, b = key[:, :, t, :, None], value[:, :, t, :, None], beta[:, :, t, None, None]
        S = S * log_decay[:, :, t].exp()[:, :, None, :]
        S = S @ (torch.eye(size, dtype=key.dtype) - b * k @ k.mT) + b * v @ k.mT
        outputs.append((S.repeat_interleave(groups, 1) @ query[:, :, t, :, None])[..., 0])
    return torch.stack(outputs, 2), S.mT


@pytest.mark.parametrize("channels", [1, 8])
class TestChunks:
    @pytest.mark.parametrize("length", [1, 2, 15, 64, 65, 200])
    def test_they_are_the_recurrence(self, channels, length):
        inputs = inputs_of(length, channels)
        state = torch.randn(2, 2, 8, 5, dtype=torch.float64)
        for before in (None, state):
            got, want = delta_rule.causal(*inputs, before), recurrence(*inputs, before)
            assert max(tiny_models.distance(a, b) for a, b in zip(got, want, strict=True)) < 1e-10

    def test_documents_are_separate(self, channels):
        inputs = inputs_of(200, channels)
        documents = torch.zeros(2, 200, dtype=torch.long)
        documents[0, [3, 64, 65, 150]] = documents[1, [16, 128]] = 1
        documents = documents.cumsum(1)
        got, want = delta_rule.causal(*inputs, None, documents), recurrence(*inputs, None, documents)
        assert max(tiny_models.distance(a, b) for a, b in zip(got, want, strict=True)) < 1e-10

    def test_gradients_are_those_of_the_recurrence(self, channels):
        gradients = []
        for form in (delta_rule.causal, recurrence):
            inputs = [x.requires_grad_() for x in inputs_of(100, channels)]
            output, state = form(*inputs)
            gradients.append(torch.autograd.grad(output.square().sum() + state.square().sum(), inputs))
        for got, want in zip(*gradients, strict=True):
            assert float((got - want).norm() / want.norm()) < 1e-9

    @pytest.mark.parametrize("case", ["repeated", "zero", "b at its ends", "all forgotten"])
    def test_at_the_ends(self, channels, case):
        query, key, value, beta, log_decay = inputs_of(150, channels)
        if case == "repeated":
            key, beta = key[:, :, :1].expand_as(key), 2 * torch.ones_like(beta)
        elif case == "zero":
            key = torch.zeros_like(key)
        elif case == "b at its ends":
            beta = beta.round()  # 0, 1, 2
        else:
            log_decay = log_decay.clone()
            log_decay[:, :, 70] = -1e30
        got = delta_rule.causal(query, key, value, beta, log_decay)
        want = recurrence(query, key, value, beta, log_decay)
        assert max(tiny_models.distance(a, b) for a, b in zip(got, want, strict=True)) < 1e-10

    def test_float32_at_65536_tokens(self, channels):
        """With few distinct keys, almost no decay, and corrections that overshoot."""
        query, key, value, beta, log_decay = inputs_of(65536, channels, torch.float32, (1, 1))
        key = key[:, :, :4].repeat(1, 1, 65536 // 4, 1)
        inputs = (query, key, value, beta, log_decay * 1e-3)
        got = delta_rule.causal(*inputs)[0]
        want = delta_rule.causal(*(x.double() for x in inputs))[0]
        assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def test_a_key_holds_its_newest_value():
    """With b = 1 and no decay: what was written under a key is gone once it is written again."""
    key = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 2]][None, None]
    value, ones = torch.randn(1, 1, 4, 3, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64)
    _, state = delta_rule.causal(None, key, value, ones)
    assert tiny_models.distance(state[0, 0, :3], value[0, 0, [2, 1, 3]]) < 1e-12


@pytest.mark.parametrize("options", [{}, {"decay": "channel", "source": "value"}])
def test_gates_learn(options):
    model = patch_model(tiny_models.llama(), "delta", options=options)
    model(tiny_models.tokens(1, 60)).logits.square().sum().backward()
    delta = model.model.layers[0].self_attn.linattn.delta
    for name, weight in delta.named_parameters():
        silent = name == "channel_down"  # behind weights of 0
        assert (float(weight.grad.abs().max()) == 0) == silent, name


def test_without_rope_is_behind_nope():
    model, ids = tiny_models.llama(), tiny_models.tokens(1, 60)
    want = patch_model(model, "nope+delta")(ids).logits
    got = patch_model(model, "delta", options={"rope": False})(ids).logits
    assert tiny_models.distance(got, want) == 0
    assert tiny_models.distance(patch_model(model, "delta")(ids).logits, want) > 1e-3


@pytest.mark.parametrize("spec", ["window+delta", "window+elu1", "window+gated"])
def test_a_hybrid_that_starts_as_its_window(spec):
    model, ids = tiny_models.llama(), tiny_models.tokens(2, 60)
    window = {"size": 8, "sinks": 2}
    want = patch_model(model, "window", options=window)(ids).logits
    patch_model(model, spec, options={"window": {**window, "mix": "interpolated"}})
    out = model(ids).logits
    assert tiny_models.distance(out, want) < 1e-12
    out.square().sum().backward()
    assert float(model.model.layers[0].self_attn.linattn.window.gate.grad.abs().max()) > 0


def test_heads_begin_with_their_half_lives():
    delta = attention_of("delta", half_life=64.0, shortest=4.0)
    logits = delta._logits(torch.randn(1, 1, 3, 32, dtype=torch.float64)).detach()[0, :, 0]
    assert logits[:, 0].tolist() == [0, 0]  # b = 1 / 2
    lives = 0.5 ** torch.tensor([1 / 4, 1 / 64])
    assert (logits[:, 1].sigmoid() ** (1 / 16)).tolist() == pytest.approx(lives.tolist(), rel=1e-6)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"beta": 0.0}, "beta must be above 0 and at most 2, got 0"),
            ({"beta": 2.5}, "beta must be"),
            ({"beta": float("nan")}, "beta must be"),
            ({"conv": 0}, "conv must be from 1 to 16 taps, got 0"),
            ({"half_life": 0.5}, "half_life must be at least 1 token"),
            ({"decay": "none", "shortest": 2.0}, "forgets nothing"),
            ({"decay": "often"}, "channel"),
            ({"feature_map": "cosine"}, "no linear patch made of a feature map alone"),
        ],
    )
    def test_bad_options(self, options, message):
        model = tiny_models.llama()
        with pytest.raises(OptionError, match=message):
            patch_model(model, "delta", options=options)
        assert not any("linattn" in name for name, _ in model.named_modules())

    def test_an_encoder(self):
        with pytest.raises(UnsupportedModelError, match="has one direction, from past to future"):
            patch_model(model_of("bert"), "delta")

    def test_a_window_with_which_it_would_share_a_sum(self):
        with pytest.raises(OptionError, match=r"mix='shared': 'delta' has no sum .* 'interpolated'"):
            patch_model(tiny_models.llama(), "window+delta", options={"mix": "shared"})

    def test_a_window_that_would_keep_last_keys(self):
        with pytest.raises(OptionError, match=r"one tensor of 'delta'.*conv=1"):
            patch_model(tiny_models.llama(), "window+delta", options={"conv": 4})

    def test_a_module_without_a_hidden_state(self, monkeypatch):
        monkeypatch.setattr("hf_linattn.patching.discovery._hidden_size", lambda *module: None)
        with pytest.raises(OptionError, match=r"width of the hidden state .*source='value'"):
            patch_model(tiny_models.llama(), "delta")
        describe(patch_model(tiny_models.llama(), "delta", options={"source": "value"}))

    def test_a_hidden_state_of_another_shape(self):
        model = patch_model(tiny_models.llama(), "delta")
        model.model.layers[1].self_attn.linattn.delta.width = 31
        with pytest.raises(UnsupportedCallError, match=r"\[rows, 20, 31\].*\(1, 20, 32\).*'value'"):
            model(tiny_models.tokens(1, 20))

    @pytest.mark.parametrize(
        ("spec", "options"), [("delta", {}), ("gated", {"source": "hidden"}), ("window+delta", {})]
    )
    def test_gates_that_are_not_numbers(self, spec, options):
        model, ids = patch_model(tiny_models.llama(), spec, options=options), tiny_models.tokens(2, 20)

        def hidden(_, args, kwargs):
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * math.nan}

        module = model.model.layers[1].self_attn
        handle = module.register_forward_pre_hook(hidden, with_kwargs=True, prepend=True)
        with pytest.raises(UnsupportedCallError, match=r"layers.1.self_attn.*: gates of .* are NaN"):
            model(ids)
        handle.remove()
        assert model(ids).logits.isfinite().all()
