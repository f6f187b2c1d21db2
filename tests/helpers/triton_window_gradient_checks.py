"""Window, sinks and what has left as one function of autograd, in Triton's interpreter against float64.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

from typing import NamedTuple

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.attention import linear
from hf_linattn.ops import dispatch, window_attention, window_rest_operator
from hf_linattn.ops import gate as gates
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import Gate, Window
from hf_linattn.ops.window_rest_operator import Rest

from . import definitions, tiny_models
from .triton_checks import assert_near, close
from .triton_gate_checks import definition as gate_definition


class Case(NamedTuple):
    """A text that begins; `sinks` are its first tokens, or `turned` others that queries meet otherwise."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    length: int = 50
    D: int = 16
    Dv: int = 16
    span: int = 9
    kind: str = "elu1"
    decay: str = ""
    sinks: int = 0
    turned: bool = False
    hidden: int = 0
    dtype: str = "float32"
    tolerance: float = 2e-6


def inputs_of(case):
    """Draw leaves by name, and masks."""
    generator = torch.Generator().manual_seed(5)

    def new(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    left, dtype = case.length - case.span, getattr(torch, case.dtype)
    leaves = {
        "query": new(case.batch, case.length, case.heads, case.D),
        "key": new(case.batch, case.length, case.kv_heads, case.D),
        "value": new(case.batch, case.length, case.kv_heads, case.Dv),
    }
    if case.turned:
        leaves["turned"] = new(case.batch, case.length, case.heads, case.D)
        leaves["sink_key"] = new(case.batch, case.sinks, case.kv_heads, case.D)
        leaves["sink_value"] = new(case.batch, case.sinks, case.kv_heads, case.Dv)
    leaves = {name: x.to(dtype).transpose(1, 2) for name, x in leaves.items()}
    if case.decay == "gate":
        leaves |= {"weight": new(case.kv_heads, case.Dv).float(), "bias": new(case.kv_heads).float()}
    elif case.decay:
        leaves["log_decay"] = -new(case.batch, case.kv_heads, left).abs().float() / 5
    valid = torch.ones(case.batch, case.length, dtype=torch.bool)
    valid[0, : case.hidden] = False
    return leaves, valid


def compute(case, leaves, valid):
    """Call the function."""
    left = case.length - case.span
    counted, sinks, first = valid, None, 0
    if case.sinks:
        ranks = torch.where(valid, valid.cumsum(1) - 1, -1)
        counted = valid & (ranks >= case.sinks) if not case.turned else valid
        of = leaves["key"][:, :, : case.sinks], leaves["value"][:, :, : case.sinks]
        if case.turned:
            of = leaves["sink_key"], leaves["sink_value"]
        there = torch.ones(case.batch, case.sinks, dtype=torch.bool)
        sinks, first = Sinks(leaves.get("turned"), *of, there, ranks), 0 if case.turned else case.sinks
    gate = Gate(leaves["weight"], leaves["bias"], 16.0) if case.decay == "gate" else None
    masked = counted[:, :left] if case.sinks or case.hidden else None
    rest = Rest(left, masked, case.kind, 0.1, leaves.get("log_decay"), gate)
    seen = Window(leaves["query"], leaves["key"], leaves["value"], counted, case.span, 0.3)
    return window_rest_operator.attention(seen, sinks, rest, first)


def definition(case, leaves, valid):
    """All pairs at once: scores of softmax where a query sees a key in its window, else of features."""
    heads, length = case.heads, case.length
    query, key, value = leaves["query"], *(definitions.repeated(leaves[x], heads) for x in ("key", "value"))
    ranks = torch.where(valid, valid.cumsum(1) - 1, -1)
    counted = valid & (ranks >= case.sinks) if case.sinks and not case.turned else valid
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near = ((distance >= 0) & (distance < case.span) & counted[:, None, None]).expand(-1, heads, -1, -1)
    far = ((distance >= case.span) & counted[:, None, None]).double()
    weights = (0.3 * query @ key.mT).exp() * near
    if case.kind == "elu1":
        phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    else:
        phi_q, phi_k = query.relu() + 0.1, key.relu() + 0.1
    linear = (phi_q @ phi_k.mT) * far
    if case.decay:
        decay = leaves.get("log_decay")
        if decay is None:
            cut = leaves["value"][:, :, : length - case.span], None, leaves["weight"], leaves["bias"], 16.0
            decay = gate_definition(*cut)
        decay = decay.masked_fill(~counted[:, None, : length - case.span], 0.0)
        running = torch.nn.functional.pad(decay.cumsum(-1), (0, case.span))
        # query i has read its state when token i - span has come
        come = torch.nn.functional.pad(decay.cumsum(-1), (case.span, 0))
        difference = (come[..., :, None] - running[..., None, :]).repeat_interleave(heads // case.kv_heads, 1)
        linear = linear * difference.masked_fill(far == 0, 0.0).exp()
    weights, values = weights + linear, value
    if case.sinks:
        met = leaves.get("turned", query)
        of = [
            definitions.repeated(leaves[f"sink_{x}"] if case.turned else leaves[x][:, :, : case.sinks], heads)
            for x in ("key", "value")
        ]
        seen = torch.arange(case.sinks) <= ranks[:, None, :, None]
        weights = torch.cat([weights, (0.3 * met @ of[0].mT).exp() * seen], -1)
        values = torch.cat([value, of[1]], 2)
    total = weights.sum(-1, keepdim=True)
    return weights @ values / torch.where(total > 0, total, 1.0)


def check_case(case):
    """Output and all gradients."""
    leaves, valid = inputs_of(case)
    exact = {name: x.double().requires_grad_() for name, x in leaves.items()}
    here = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    want, got = definition(case, exact, valid), compute(case, here, valid)
    assert got.dtype is here["value"].dtype
    close(got, want.detach(), case.tolerance, "output")
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    weight = weight * valid[:, None, :, None]
    expected = torch.autograd.grad((want * weight).sum(), list(exact.values()))
    found = torch.autograd.grad(got, list(here.values()), weight.to(got.dtype))
    for name, a, b in zip(here, found, expected, strict=True):
        assert a.dtype is here[name].dtype
        if not float(b.norm()) > 1e-12:  # the first token's decay scales nothing
            assert float(a.norm()) < 1e-6, name
            continue
        close(a, b, 5 * case.tolerance, f"gradient of {name}")


def check_gradients_of_gradients():
    """They are those of all pairs at once."""
    case = Case(length=13, span=4, D=4, Dv=4, sinks=2, decay="gate")
    leaves, valid = inputs_of(case)
    results = []
    for form, dtype in ((definition, torch.float64), (compute, torch.float32)):
        here = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
        first = torch.autograd.grad(
            form(case, here, valid).square().sum(), list(here.values()), create_graph=True
        )
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(here.values())))
    for a, b in zip(*results, strict=True):
        close(b, a, 1e-4, "second derivative")


def check_a_model(sinks, length, first):
    """A text without padding has its sinks in front, unless it is shorter than they are many."""
    runs, told, attend = [], [], window_rest_operator.attention

    def joined(*given):
        told.append(given[-1])
        return attend(*given)

    for triton in (True, False):
        model = patch_model(tiny_models.llama(1), "window+gated", options={"size": 4, "sinks": sinks}).float()
        with pytest.MonkeyPatch.context() as patch:
            if triton:
                for module in (linear, dispatch):
                    patch.setattr(module, "choose_backend", lambda *about, **more: "triton")
                for module in (window_attention, gates):
                    patch.setattr(module, "kernels_take", lambda *about: True)
                patch.setattr(window_rest_operator, "attention", joined)
            logits = model(tiny_models.tokens(2, length), use_cache=False).logits
            logits.square().mean().backward()
        runs.append([logits, *(x.grad for x in model.parameters() if x.grad is not None)])
    assert told == [first]
    assert_near(*([x.detach() for x in run] for run in runs))
