"""Which form of linear attention runs where: one rule, measured by `python -m hf_linattn.bench`."""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build
from hf_linattn.ops.cpp import linear as native
from hf_linattn.ops.triton import launch
from hf_linattn.ops.types import Inputs, OpConfig

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
TRITON = "HF_LINATTN_TRITON"
"""Environment variable that allows the Triton kernels: compiled and interpreted in the tests, they have not
run on a GPU yet."""


def has_kernels(query: Tensor, key: Tensor, value: Tensor, kind: str, linked: bool) -> bool:
    """Tell whether `ops.linear_attention` runs where these are; else vectorised torch operations do.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        kind: the map inside the kernel, "none" for features.
        linked: there are documents or decay.
    """
    if torch.compiler.is_exporting():  # an exported program runs without this package
        return False
    if query.is_cpu:
        # of one token torch makes few operations, or one where it compiles them
        return key.shape[2] > 1 or (not torch.compiler.is_compiling() and native.reads(query, key, value))
    if not query.is_cuda:
        return False
    allowed = os.environ.get(TRITON) == "1" and launch.available(query.device)
    return allowed and kind == "elu1" and not linked and launch.supports(query, key, value)


def form(inputs: Inputs, how: OpConfig) -> Literal["triton", "native", "quadratic", "loop", "both ways"]:
    """Choose one of the forms that `ops.linear_attention` has."""
    if inputs.query.is_cuda:
        return "triton"
    if native.takes(inputs):
        return "native"
    if not how.causal:
        longest = max(inputs.query.shape[2], inputs.key.shape[2])
        return "quadratic" if longest <= SHORT_BOTH_WAYS else "both ways"
    short = SHORT_AND_SMALL if _small(inputs) else SHORT
    plain = all(x is None for x in inputs[4:])
    return "quadratic" if plain and inputs.key.shape[2] <= short else "loop"


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


def explain() -> str:
    """Say the rule as text."""
    return f"""\
causal linear attention, first line that fits (files in hf_linattn/ops):
  torch.export                       vectorised torch operations
  CPU with {build.CPP}=1, at most 32 bits
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
  CUDA with {TRITON}=1 and triton, elu1, neither decay nor packed
  documents
                                     Triton kernels (triton/launch.py)
  any other device                   vectorised torch operations (eager/linear.py)
bidirectional and cross-attention:
  CPU with {build.CPP}=1, at most 32 bits
                                     kernels in C++ (cpp/linear.py)
  CPU, at most {SHORT_BOTH_WAYS} queries and keys
                                     all scores at once (eager/quadratic.py)
  CPU                                a sum over all keys that every query reads, in chunks whose buffers
                                     hold {NUMBERS:,} numbers, maps inside as above (eager/bidirectional.py)
  CUDA                               as above
  torch.export, any other device     the sum in vectorised torch operations (eager/linear.py)
windows, with a linear attention for the rest or without:
  CPU with {build.CPP}=1, at most 32 bits
                                     kernels in C++, tile by tile (cpp/window.py); a decoded token
                                     without sinks in one call (cpp/window_decode.py), unless it is
                                     compiled by torch.compile
  CPU                                torch's fused kernel, block by block (window_attention.py); a text
                                     inside the window in one call of it
  any other device                   vectorised torch operations (eager/window.py)"""
