"""output_gate: a sigmoid gate on the output of any attention."""

from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.attention.call import Call
from hf_linattn.registry import register

from ._gates import read_hidden, source_width


@register("output_gate")
class OutputGate(Modifier):
    """A gate on the output of each head, from the hidden state: a head can say nothing.

    o'_i = 2 sigmoid(w_h x_i) o_i, x_i the hidden state that the module gets

    w = 0 at the start, so patching changes nothing. The published gate has no factor 2, which models that are
    trained with it put into their output projection. Like softmax1 it gives a head that has nothing to say a
    way to be silent, other than to attend to the first token.

    Options:
        per: "head" (default), one gate per query head; "channel", one for each number of the output.

    Use: with any attention, softmax too, where there is something to train on: against attention sinks and
        outliers, and behind a state without denominator.

    Source: "Gated Attention for Large Language Models", Qiu et al. 2025, arXiv:2505.06708, section 2.2 (G1).
    """

    needs_hidden = True

    def __init__(self, site: AttentionSite, *, per: Literal["head", "channel"] = "head") -> None:
        super().__init__(site)
        heads, value_dim = site.require("heads", "value_dim", reason="so it can have no gates")
        self.width = source_width(site, "hidden")
        self.weight = nn.Parameter(torch.zeros(heads, 1 if per == "head" else value_dim, self.width))

    def output(self, call: Call, output: Tensor) -> Tensor:
        """Multiply `[B, H, N, Dv]` by the gates."""
        hidden = read_hidden(call, self.width)
        logits = nn.functional.linear(hidden, self.weight.to(hidden.dtype).flatten(0, 1))
        gates: Tensor = 2 * logits.sigmoid().unflatten(-1, self.weight.shape[:2])  # [B, N, H, 1 or Dv]
        return output * gates.transpose(1, 2).to(output.dtype)
