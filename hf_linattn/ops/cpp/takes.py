"""Which calls the C++ kernels take: on a CPU, of at most 32 bits, where they run at all."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from hf_linattn.ops.cpp import auto
from hf_linattn.ops.cpp.layout import DTYPES
from hf_linattn.ops.cpp.linear import SUMS
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.types import DeltaInputs, HeavyState, ScaledSums, State, Window


def _reads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not query.is_cpu or type(query) is not Tensor:
        return False  # a tensor of another class may have no memory to read
    if by_torch_alone():
        return False
    return query.dtype in DTYPES and key.dtype in DTYPES and value.dtype in DTYPES and auto.ready()


def linear(query: Tensor, key: Tensor, value: Tensor, state: State | None = None) -> bool:
    """Tell whether they take a linear attention: sums in float32, nothing empty."""
    if not _reads(query, key, value):
        return False
    if state is not None and not (state.S.dtype == SUMS and state.z.dtype == SUMS):
        return False
    return bool(query.numel() and key.numel() and value.numel())


def delta(inputs: DeltaInputs) -> bool:
    """Tell whether they take a delta rule: gates and state in float32, nothing empty."""
    query, key, value, gates, state, *_ = inputs
    if (gates is not None and gates.dtype != SUMS) or (state is not None and state.dtype != SUMS):
        return False
    return linear(key if query is None else query, key, value)


def softmax_map(x: Tensor, weight: Tensor) -> bool:
    """Tell whether they take a learned map, `[B, H, N, D]` and `[H, F / 2, D]`."""
    return _reads(x, x, weight) and type(weight) in (Tensor, Parameter) and bool(x.numel())


def window(window: Window, other: ScaledSums | None) -> bool:
    """Tell whether they take a window: other sums in float32."""
    return _reads(window.query, window.key, window.value) and all(x.dtype == SUMS for x in other or ())


def heavy(query: Tensor, key: Tensor, value: Tensor, before: HeavyState | None) -> bool:
    """Tell whether they take a window with heavy hitters: a cache in the dtypes of key and value."""
    if not (_reads(query, key, value) and query.numel() and key.numel() and value.numel()):
        return False
    if before is None:
        return True
    return (before.key.dtype, before.value.dtype, before.weight.dtype) == (key.dtype, value.dtype, SUMS)
