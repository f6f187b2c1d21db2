"""Formulas of what changes the output of an attention: float64, one function each."""

import torch
from torch import Tensor

from helpers.oracle import Case, Inputs, output_modifier

CASES: dict[str, Case] = {
    "output_gate": Case("output_gate"),
    "output_gate, channel": Case("softmax1+output_gate", {"per": "channel"}),
    "elu1+output_gate": Case("elu1+output_gate"),
    "output_norm": Case("output_norm"),
    "decay, halo": Case(
        "decay+output_norm", {"rates": "lightning", "normalise": "none", "feature_map": "cosine"}
    ),
}


@output_modifier("output_gate")
def output_gate(x: Inputs, output: Tensor) -> Tensor:
    logits = torch.einsum("bnc,hec->bhne", x.hidden, x.parameter("output_gate.weight"))
    return output * 2 / (1 + (-logits).exp())


@output_modifier("output_norm")
def output_norm(x: Inputs, output: Tensor) -> Tensor:
    size = (output.pow(2).mean(-1, keepdim=True) + x.options.get("eps", 1e-6)).sqrt()
    return output / size * x.parameter("output_norm.weight")[None, :, None]
