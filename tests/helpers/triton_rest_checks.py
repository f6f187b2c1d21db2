"""What the Triton kernel of a window and the rest must do, interpreted: float64, and the kernels apart.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

from typing import NamedTuple

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.ops import window_attention
from hf_linattn.ops.triton import launch, plan, window, window_rest, window_rest_selftest
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.triton.window_rest import Rest
from hf_linattn.ops.triton.window_rest_selftest import RestForm
from hf_linattn.ops.types import Inputs, ScaledSums, Window

from . import tiny_models, triton_window_checks
from .triton_checks import close, sums_on_a_device
from .triton_selftest_checks import Folder
from .triton_window_checks import Lying, definition, key_of

CONFIG = tiny_models.SIZES | {"num_hidden_layers": 1}


class Case(NamedTuple):
    """A window and a linear attention behind it; `segment` tokens a program."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    length: int = 50
    D: int = 16
    Dv: int = 16
    features: int = 16
    kind: str = "elu1"
    span: int = 9
    state: bool = False
    padded: bool = False
    decays: bool = False
    sinks: int = 0
    turned: bool = False
    segment: int | None = None
    dtype: str = "float32"
    tolerance: float = 3e-6


def given(case):
    """Inputs as a prompt has them, or a part of one behind a state."""
    generator = torch.Generator().manual_seed(len(repr(case)))

    def new(*shape):
        return torch.randn(shape, generator=generator)

    def tokens(heads, count, width):
        x = new(case.batch, count, heads, width).to(getattr(torch, case.dtype))
        return x.transpose(1, 2)

    batch, kv_heads, length = case.batch, case.kv_heads, case.length
    keys = length + case.span if case.state else length
    left = keys - case.span
    query, key, value = (
        tokens(case.heads, length, case.D),
        tokens(kv_heads, keys, case.D),
        tokens(kv_heads, keys, case.Dv),
    )
    valid = torch.ones(batch, keys, dtype=torch.bool)
    if case.padded:
        valid = torch.rand(batch, keys, generator=generator) > 0.2
        valid[0, :7] = False
    seen = Window(query, key, value, valid, case.span, 0.3)
    own, scale = (query[:, :, length - left :], key[:, :, :left]), None
    if case.kind == "none":
        own = tokens(case.heads, left, case.features).abs(), tokens(kv_heads, left, case.features).abs()
        scale = new(batch, case.heads, left)
    state = None, None
    if case.state:
        state = new(batch, kv_heads, case.features, case.Dv), new(batch, kv_heads, case.features).abs()
    decay = -new(batch, kv_heads, left).abs() if case.decays else None
    hidden = valid[:, :left].contiguous() if case.padded else None
    rest = Rest(Inputs(*own, value[:, :, :left], hidden, *state, decay), case.kind, 1e-3, scale)
    sinks = None
    if case.sinks:
        turned = tokens(case.heads, length, case.D) if case.turned else None
        own = (tokens(kv_heads, case.sinks, width) for width in (case.D, case.Dv))
        there = torch.ones(batch, case.sinks, dtype=torch.bool)
        ranks = torch.arange(length).expand(batch, -1) // 3 - 1
        sinks = Sinks(turned, *own, there, ranks)
    return seen, sinks, rest


def linear(rest, dtype=torch.float64):
    """Compute the sums of the linear attention, token after token, and its state."""
    query, key, value, valid, S, z, decay, _ = (
        x if x is None or x.dtype == torch.bool else x.to(dtype) for x in rest.inputs
    )
    heads, kv_heads = query.shape[1], key.shape[1]
    maps = {"elu1": lambda x: torch.where(x > 0, x + 1, x.exp()), "relu": lambda x: x.relu() + rest.eps}
    phi_q, phi_k = (maps.get(rest.kind, lambda x: x)(x) for x in (query, key))
    S = phi_k.new_zeros(*phi_k.shape[:2], phi_k.shape[3], value.shape[3]) if S is None else S
    z = phi_k.new_zeros(*phi_k.shape[:2], phi_k.shape[3]) if z is None else z
    numerators, totals = [], []
    for i in range(key.shape[2]):
        if decay is not None:
            left = decay[:, :, i].exp()
            S, z = S * left[..., None, None], z * left[..., None]
        phi = phi_k[:, :, i] if valid is None else phi_k[:, :, i] * valid[:, None, i, None]
        S, z = S + phi[..., None] * value[:, :, i, None], z + phi
        wide = [x.repeat_interleave(heads // kv_heads, 1) for x in (S, z)]
        numerators.append((phi_q[:, :, i, None] @ wide[0])[:, :, 0])
        totals.append((phi_q[:, :, i] * wide[1]).sum(-1))
    total = torch.stack(totals, 2)
    scale = torch.zeros_like(total) if rest.log_scale is None else rest.log_scale.to(dtype)
    return ScaledSums(torch.stack(numerators, 2), total, scale), S, z


def exact(seen, sinks, others):
    """All pairs at once in float64."""
    names = ("query", "key", "value")
    wide = seen._replace(**{name: getattr(seen, name).double() for name in names})
    if sinks is not None:
        doubled = {name: getattr(sinks, name) for name in names}
        sinks = sinks._replace(**{name: x if x is None else x.double() for name, x in doubled.items()})
    return definition(triton_window_checks.Inputs([], wide, sinks, others))


def check_case(case):
    """The output and the state after."""
    seen, sinks, rest = given(case)
    others, S, z = linear(rest)
    output, *after = window_rest.forward(seen, sinks, rest, case.segment)
    assert output.dtype is seen.value.dtype
    assert output.transpose(1, 2).is_contiguous()
    close(output, exact(seen, sinks, others), case.tolerance, "output")
    close(after[0], S, case.tolerance, "S")
    close(after[1], z, case.tolerance, "z")


def check_it_equals_the_kernels_apart():
    """Numerators that pass through memory are the same, whatever the features are divided by."""
    for case in (Case(sinks=2, padded=True), Case(kind="none", features=24, state=True, decays=True)):
        seen, sinks, rest = given(case)
        how = {"eps": rest.eps, "log_decay": rest.inputs.log_decay}
        numerator, total, S, z = launch.forward(*rest.inputs[:6], rest.kind, False, **how)
        scale = rest.log_scale
        if scale is None:
            scale = rest.inputs.query.amax(-1).clamp(max=0)
        want = window.forward(seen, sinks, ScaledSums(numerator, total, scale))[0]
        output, *after = window_rest.forward(seen, sinks, rest)
        for name, a, b in zip(("output", "S", "z"), (output, *after), (want, S, z), strict=True):
            close(a, b.double(), 2 * case.tolerance, name)  # each is as near to float64


def check_segments_in_parts():
    """Where key heads are few, a segment is summed up in parts, one slot each."""
    with pytest.MonkeyPatch.context() as patch:
        seen = sums_on_a_device(patch, 32)
        for span in (21, 70):
            check_case(Case(length=220, kv_heads=1, span=span, decays=True, sinks=3, segment=64))
    assert seen == [(32, 6), (32, 4)]


def check_numbers_far_apart():
    """Sums of a scale near the ends of float32 are joined; a query that sees nothing gives 0."""
    seen, sinks, rest = given(Case(kind="none", padded=True))
    for shift in (-100.0, 100.0):
        far = rest._replace(log_scale=rest.log_scale + shift)
        close(
            window_rest.forward(seen, sinks, far)[0],
            exact(seen, sinks, linear(far)[0]),
            1e-4,
            shift,
        )
    nothing = torch.zeros_like(seen.valid)
    hidden = rest._replace(inputs=rest.inputs._replace(key=torch.zeros_like(rest.inputs.key)))
    output, S, z = window_rest.forward(seen._replace(valid=nothing), sinks, hidden)
    assert not any(x.any() for x in (output, S, z))


def check_the_check(path):
    """It takes the kernel, and finds a decay, a mask or a sum that is left out."""
    form = RestForm(16, "elu1", sinks=True, decays=True)
    key = key_of(form, grouped=False)
    assert window_rest_selftest.disagreement(key, window_rest, 80) is None

    def without(name):
        def call(seen, sinks, rest, segment):
            inputs = rest.inputs._replace(**{name: None})
            return window_rest.forward(seen, sinks, rest._replace(inputs=inputs), segment)

        return call

    def shifted(seen, sinks, rest, segment):
        return window_rest.forward(seen._replace(span=seen.span + 1), sinks, rest, segment)

    def changed(seen, sinks, rest, segment):
        output, S, z = window_rest.forward(seen, sinks, rest, segment)
        return output, S, z * 1.01

    lies = (
        ("output", without("log_decay")),
        ("output", without("valid")),
        ("output", shifted),
        ("z", changed),
    )
    for index, (what, lie) in enumerate(lies):
        with Folder(path / str(index)):
            checks = Checks(launch, 40, rests=Lying(window_rest, forward=lie))
            with pytest.warns(UserWarning, match=f"disagree with float64: .*{what}.*report"):
                assert not checks.takes(key)
            assert "window and rest, 16 features, elu1, sinks, decay" in checks.summary()[0]


def check_the_choice():
    """One kernel where nothing is spilled and its programs fill the device."""
    patch = pytest.MonkeyPatch()
    x = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    seen = Window(x, x, x, torch.ones(1, 8, dtype=torch.bool), 4, 1.0)
    assert window_rest.pays(seen, 64, 4096)
    assert not window_rest.pays(seen, 128, 4096)
    assert not window_rest.pays(seen, 16, 200)
    assert not window_rest.pays(seen._replace(query=x.float()), 16, 4096)
    for capability in ((0, 0), (12, 0)):
        patch.setattr(plan, "device_of", lambda device, of=capability: plan.Device(of, 1))
        assert not window_rest.pays(seen, 16, 4096)
    patch.undo()


def check_hybrids_take_it():
    """A prompt with padding and what follows it, in models, as through torch's operations."""
    patch, asked = pytest.MonkeyPatch(), []
    ids = tiny_models.tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for name in ("window+gated", "window+hedgehog"):
        model = tiny_models.build("LlamaForCausalLM", dtype=torch.float32, **CONFIG)
        patch_model(model, name, options={"size": 9, "sinks": 2})
        found = []
        for wanted in (False, True):

            def takes(window, form, left, sinks, wanted=wanted):
                asked.append(form)
                return wanted

            patch.setattr(window_attention, "one_kernel_takes", takes)
            with torch.no_grad():
                first = model(ids[:, :19], attention_mask=mask[:, :19], use_cache=True)
                last = model(ids[:, 19:], attention_mask=mask, past_key_values=first.past_key_values)
            found.append(torch.cat([first.logits, last.logits], 1))
            patch.undo()
        counted = mask.bool()
        assert tiny_models.distance(found[1][counted], found[0][counted]) < 1e-5, name
        model(ids[:, :19]).logits.sum().backward()  # which has gradients: the kernels apart
    assert {(x.kind, x.decays, x.features) for x in asked} == {("elu1", True, 8), ("none", False, 16)}
    assert len(asked) == 2 * 2 * 2, asked
