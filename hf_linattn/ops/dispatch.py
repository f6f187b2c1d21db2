"""Which form of causal linear attention runs where: one rule, measured by `python -m hf_linattn.bench`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hf_linattn.ops.loop import Inputs

SHORT = 192
"""Up to so many tokens all scores at once, unless something comes before, decays or ends."""
CHUNK = 64
FEW = 16
"""Rows times key heads below which several threads want larger chunks."""


def has_kernels(*tensors: Tensor) -> bool:
    """Whether `ops.kernels` takes these; else vectorised torch operations compute them."""
    if torch.compiler.is_exporting():  # an exported program runs without this package
        return False
    return all(x.device.type == "cpu" and x.is_floating_point() for x in tensors)


def form(inputs: Inputs) -> Literal["quadratic", "loop"]:
    """Of the forms on the CPU."""
    plain = all(x is None for x in inputs[4:])
    return "quadratic" if plain and inputs.key.shape[2] <= SHORT else "loop"


def chunk(inputs: Inputs) -> int:
    """Tokens per step of the loop."""
    batch, kv_heads, length, _ = inputs.key.shape
    if length <= 2 * CHUNK:
        return length
    return 2 * CHUNK if torch.get_num_threads() > 1 and batch * kv_heads < FEW else CHUNK


def explain() -> str:
    """The rule in words."""
    return f"""\
causal linear attention, first line that fits:
  torch.export                       vectorised torch operations
  one token                          update of the state and read
  CPU, at most {SHORT} tokens from the start, neither decay nor packed documents
                                     all scores at once (ops/quadratic.py)
  CPU                                loop over chunks of {CHUNK} tokens, at most {2 * CHUNK} at once, or
                                     {2 * CHUNK} with several threads and fewer than {FEW} rows x key heads
                                     (ops/loop.py); maps inside it: elu1, relu
  any other device                   vectorised torch operations (ops/linear.py)
bidirectional: one sum over all keys, read by every query (ops/linear.py)"""
