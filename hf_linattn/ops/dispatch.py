"""Which form of linear attention runs where: one rule, measured by `python -m hf_linattn.bench`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hf_linattn.ops.cpp import auto, build, takes
from hf_linattn.ops.cpp.linear import SUMS
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.triton import check
from hf_linattn.ops.triton.selftest import Form
from hf_linattn.ops.types import Inputs, OpConfig, State

SHORT = 192
"""Up to so many tokens all scores at once, unless something comes before, decays or ends."""
CHUNK = 64
SMALL = 256
"""Rows times key heads times their size below which calls cost more than arithmetic."""
SHORT_AND_SMALL = 256
SHORT_BOTH_WAYS = 128
"""Up to so many queries and keys all scores at once, over all keys."""
NUMBERS = 1 << 18
"""In a buffer of the form over all keys: some of them together stay in a cache of a core."""
FEW = 16
"""Rows times key heads below which several threads want larger chunks."""
Backend = Literal["vectorised", "eager", "cpp", "triton"]
"""Who computes a call: torch operations alone, the forms in `ops/eager` with a backward of their own, the
kernels in C++, or those in Triton. Decided once, for the backward too."""


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kind: str,
    state: State | None = None,
    form: Form | None = None,
    features: int | None = None,
) -> Backend:
    """Decide who computes a call of linear attention.

    Args:
        query: `[B, H, N, D]`, as the model gives it.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        kind: the map inside the kernel, "none" for features.
        state: of the tokens before, None for nothing.
        form: what is computed; None for outputs of `kind`, causal.
        features: number of features with "none"; None for D.
    """
    if query.is_cpu:
        # of one token torch makes few operations, or one where it compiles them
        single = key.shape[2] == 1
        if not (single and torch.compiler.is_compiling()) and takes.linear(query, key, value, state):
            return "cpp"
        # an exported program runs without this package
        return "vectorised" if single or by_torch_alone() else "eager"
    if (
        query.is_cuda
        and not by_torch_alone()
        and check.takes(query, key, value, form or Form(kind), features)
    ):
        return "triton"
    return "vectorised"


def kernel_backend(inputs: Inputs) -> Backend:
    """Decide which kernels compute these inputs, whatever torch operations alone would take."""
    if inputs.query.is_cuda:
        return "triton"
    query, key, value, _, S, z, log_decay, _ = inputs
    state = None if S is None or z is None else State(S, z)
    decays = log_decay is None or log_decay.dtype == SUMS
    return "cpp" if decays and takes.linear(query, key, value, state) else "eager"


def form(inputs: Inputs, config: OpConfig) -> Literal["quadratic", "chunked", "bidirectional"]:
    """Choose among the forms of `ops/eager`, by sizes alone: forward and backward find the same."""
    if not config.causal:
        longest = max(inputs.query.shape[2], inputs.key.shape[2])
        return "quadratic" if longest <= SHORT_BOTH_WAYS else "bidirectional"
    short = SHORT_AND_SMALL if _small(inputs) else SHORT
    plain = all(x is None for x in inputs[4:])
    return "quadratic" if plain and inputs.key.shape[2] <= short else "chunked"


def _small(inputs: Inputs) -> bool:
    batch, kv_heads, _, size = inputs.key.shape
    return batch * kv_heads * size < SMALL


def chunk(inputs: Inputs) -> int:
    """Choose the tokens per step of `eager.chunked`."""
    batch, kv_heads, length, _ = inputs.key.shape
    if length <= 2 * CHUNK:
        return length
    few = torch.get_num_threads() > 1 and batch * kv_heads < FEW
    return 2 * CHUNK if few or _small(inputs) else CHUNK


def kernels() -> dict[str, str]:
    """Say who computes and why, by kind of device: `{"cpu": "cpp, prebuilt x86-64-v4"}`.

    Raises:
        OptionError: as `ops.cpp.build.asked`.
    """
    found = {"cpu": auto.verdict()}
    if torch.cuda.is_available():
        calls = "; ".join(check.summary())
        found["cuda"] = calls or "kernels where they agree with float64, else torch: nothing was computed yet"
    return found


def explain() -> str:
    """Say the rule as text, and who computes here."""
    here = "\n".join(f"  {device:33}{text}" for device, text in kernels().items())
    return f"""\
kernels here:
{here}
causal linear attention, first line that fits (files in hf_linattn/ops):
  torch.export, torch.func           vectorised torch operations
  CPU with a library of C++ kernels, at most 32 bits
                                     kernels in C++, in chunks of {CHUNK} tokens (cpp/linear.py); one token
                                     too, unless it is compiled by torch.compile
  CPU, one token                     update of the state and read (eager/linear.py)
  CPU, at most {SHORT} tokens ({SHORT_AND_SMALL} if rows x key heads x their size are below {SMALL}) from
  the start, neither decay nor packed documents
                                     all scores at once (eager/quadratic.py)
  CPU                                loop over chunks of {CHUNK} tokens, maps inside: elu1, relu
                                     (eager/chunked.py); of {2 * CHUNK} if that is all, if rows x key heads
                                     x their size are below {SMALL}, or with several threads and
                                     fewer than {FEW} rows x key heads
  CUDA or ROCm with triton, where the kernels agree with float64 on that device (triton/check.py;
  {check.TRITON}=0 turns them off)
                                     Triton kernels (triton/launch.py)
  any other device                   vectorised torch operations (eager/linear.py)
bidirectional and cross-attention:
  CPU with a library of C++ kernels, at most 32 bits
                                     kernels in C++ (cpp/linear.py)
  CPU, at most {SHORT_BOTH_WAYS} queries and keys
                                     all scores at once (eager/quadratic.py)
  CPU                                a sum over all keys that every query reads, in chunks whose buffers
                                     hold {NUMBERS:,} numbers, maps inside as above (eager/bidirectional.py)
  CUDA                               as above
  torch.export, torch.func, any other device
                                     the sum in vectorised torch operations (eager/linear.py)
windows, with a linear attention for the rest or without:
  CPU with a library of C++ kernels, at most 32 bits
                                     kernels in C++, tile by tile (cpp/window.py), sinks among them unless
                                     compiled by torch.compile; a text inside the window too, unless it is
                                     of few tokens in float32; a decoded token with sinks and the rest in
                                     one call (cpp/window_decode.py), unless it is compiled
  CPU                                torch's fused kernel, block by block (window_attention.py); a text
                                     inside the window in one call of it
  CUDA                               Triton kernels with sinks and the rest's sums, a decoded token with its
                                     state, a prompt with the rest (triton/window.py, triton/window_token.py,
                                     triton/window_rest.py), as above; heavy hitters (triton/heavy.py),
                                     of which torch operations compute a prompt elsewhere
  any other device                   vectorised torch operations (eager/window.py)
learned maps [softmax(W x), softmax(-W x)], for causal linear attention:
  CPU with a library of C++ kernels, at most 32 bits
                                     kernels in C++ (cpp/softmax_map.py), unless compiled by torch.compile
  CUDA                               Triton kernels (triton/softmax_map.py), likewise
  all others                         torch operations
gates of a state, made of values:
  CPU with a library of C++ kernels  inside those of the attention
  CUDA                               Triton kernels (triton/gate.py), unless compiled by torch.compile
  all others                         torch operations
the delta rule:
  CPU with a library of C++ kernels, at most 32 bits
                                     kernels in C++ (cpp/delta.py)
  CUDA or ROCm with fla-core, where its kernels agree with float64 on that device (fla/check.py),
  in chunks for bfloat16 and float16 alone
                                     its kernels (fla/rule.py), unless compiled by torch.compile
  all others                         torch operations in chunks (eager/delta_rule.py)
a library of C++ kernels:
  {build.CPP + " not set":35}one that came with the package, else one that was compiled here for
                                     this processor and these sources; it must agree with torch on a
                                     small problem for each kernel
  {build.CPP + "=1":35}the first of these, else it is compiled now; what hinders is an error
  {build.CPP + "=0":35}none"""
