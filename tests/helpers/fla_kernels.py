"""fla-core for tests: its kernels interpreted, and a library of that name with the same conventions."""

import builtins
import importlib.metadata
import sys
from types import ModuleType

import torch

from hf_linattn.ops import delta_rule
from hf_linattn.ops.fla import check, rule, selftest
from hf_linattn.ops.triton import check as shared
from hf_linattn.ops.triton import launch
from hf_linattn.ops.types import DeltaConfig, DeltaInputs


class Index(int):
    """A number of a loop, which kernels expect to be one of triton's."""

    def to(self, dtype):
        return self


def interpreted_range(*bounds):
    return map(Index, builtins.range(*map(int, bounds)))


def interpret():
    """Make triton's interpreter take fla's kernels: the first tile in place of the fastest, and loops."""
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def run_first(self, *arguments, **options):
        self.configs = self.configs[:1]
        return run(self, *arguments, **options)

    if run.__name__ != "run_first":
        autotuner.Autotuner.run = run_first
    for kind in ("delta_rule", "gated_delta_rule", "kda"):
        rule.function(kind, False)
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.range = interpreted_range


def recurrence(q, k, v, g, beta, scale, initial_state):
    """The rule in fla's words: `[B, T, H, D]`, S `[B, H, D, Dv]`, g a logarithm."""
    S = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    S, outputs = S if initial_state is None else initial_state, []
    q, k, v = (x.to(S.dtype) for x in (q * scale, k, v))
    for t in range(k.shape[1]):
        if g is not None:
            S = S * (g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, :, None]).exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhde,bhd->bhe", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhde,bhd->bhe", S, q[:, t]))
    return torch.stack(outputs, 1), S


class FakeFla:
    """Modules `fla.ops.*` whose functions refuse what fla refuses and compute by `recurrence`.

    Attributes:
        calls: names of the functions that were called.
        change: called with output and state; what it returns is returned in their place.
        error: raised in their place, where there is one.
    """

    def __init__(self, monkeypatch):
        self.calls, self.error, self.patch = [], None, monkeypatch
        self.change = lambda output, state: (output, state)
        modules = {kind: ModuleType(f"fla.ops.{kind}") for kind in ("delta_rule", "gated_delta_rule", "kda")}
        for kind, module in modules.items():
            for form in ("chunk", "fused_recurrent"):
                setattr(module, f"{form}_{kind}", self.function(form, kind))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        found = check.importlib.util.find_spec
        monkeypatch.setattr(
            check.importlib.util, "find_spec", lambda name: name == "fla" or found(name), raising=True
        )
        self.version("0.6.0")
        monkeypatch.setattr(launch, "available", lambda device: True)
        monkeypatch.setattr(check, "DELTA", check.DeltaChecks(length=70))
        monkeypatch.setattr(shared, "ALL", [check.DELTA])

    def version(self, text):
        real = importlib.metadata.version
        self.patch.setattr(
            check.importlib.metadata, "version", lambda name: text if name == "fla-core" else real(name)
        )
        forget()

    def function(self, form, kind):
        def call(q, k, v, g=None, beta=None, *, scale, initial_state, output_final_state):
            self.calls.append(f"{form}_{kind}")
            if self.error is not None:
                raise self.error
            recurrent = form == "fused_recurrent"
            assert q.shape == k.shape == (*v.shape[:3], k.shape[3])
            assert recurrent or (q.dtype == k.dtype == v.dtype != torch.float32)
            assert beta.shape == k.shape[:3]
            assert (g is None) == (kind == "delta_rule")
            assert g is None or g.shape == (k.shape if kind == "kda" else k.shape[:3])
            assert initial_state is None or initial_state.dtype == torch.float32
            assert output_final_state
            needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, beta))
            assert not (recurrent and needs)
            output, state = recurrence(q, k, v, g, beta, scale, initial_state)
            return self.change(output.to(v.dtype), state)

        return call


def forget():
    """Let what was found out about fla be found out again."""
    check._missing.cache_clear()
    rule.function.cache_clear()


class OnGpu(torch.Tensor):
    """A tensor that says it is elsewhere."""

    is_cuda = True
    is_cpu = False


def inputs_of(parts, length, dtype, group=1, size=16, wide=24):
    """Inputs of a delta rule, with what `parts` names; padded tokens hold NaN."""
    make, heads = torch.Generator().manual_seed(length), 2

    def normal(*sizes):
        return torch.randn(2, *sizes, generator=make)

    query = normal(length, heads * group, size).transpose(1, 2)
    key, value = normal(length, heads, size).transpose(1, 2), normal(length, heads, wide).transpose(1, 2)
    gates = normal(heads, length, 1 + (size if "channel" in parts else "head" in parts))
    state = normal(heads, size, wide) if "state" in parts else None
    valid, documents = None, None
    if "padding" in parts:
        valid = torch.rand(2, length, generator=make) < 0.7
        key, value = (x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (key, value))
    if "documents" in parts:
        documents = (torch.rand(2, length, generator=make) < 0.1).long().cumsum(1)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    return DeltaInputs(query, key, value, gates, state, valid, documents)


def config_of(parts):
    return DeltaConfig("channel" if "channel" in parts else "head" if "head" in parts else "none", 2.0, 16.0)


def both(parts, length, dtype, group, gradients):
    """Results, and gradients where they are wanted: as on a GPU, and by torch operations in float64."""
    found, scale = [], torch.linspace(0.5, 1.5, 2 * group)
    inputs = inputs_of(parts, length, dtype, group)
    exact = [x.double().nan_to_num() if x is not None and x.is_floating_point() else x for x in inputs]
    for given, on in ((inputs, OnGpu), (exact, torch.Tensor)):
        own = [None if x is None else x.clone().as_subclass(on) for x in given]
        leaves = [x for x in own[:5] if x is not None]
        for x in leaves:
            x.requires_grad_(gradients)
        results = delta_rule.attention(DeltaInputs(*own), config_of(parts), scale, keep=True)
        if gradients:
            weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in results]
            loss = sum((x * w.to(x)).sum() for x, w in zip(results, weights, strict=True))
            results = (*results, *torch.autograd.grad(loss, leaves))
        found.append([x.detach().as_subclass(torch.Tensor).double() for x in results])
    return found


def farthest(got, want):
    """Return the largest distance over the length of what is wanted."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def check_interpreted(kind, recurrent, dtype, length):
    """fla's own kernels pass the trial; in a process whose triton interprets."""
    interpret()
    key = selftest.Key(torch.device("cpu"), getattr(torch, dtype), 16, 24, kind, recurrent)
    assert selftest.disagreement(key, rule, length) is None


def check_interpreted_mapping(parts, length, dtype, group, gradients, bound):
    """fla's own kernels, called as on a GPU, compute what torch operations do in float64."""
    interpret()
    real = check.takes, check.Tensor
    asked = []
    check.takes, check.Tensor = lambda *terms: asked.append(1) or True, OnGpu
    try:
        assert farthest(*both(parts, length, getattr(torch, dtype), group, gradients)) < bound
    finally:
        check.takes, check.Tensor = real
    assert asked
