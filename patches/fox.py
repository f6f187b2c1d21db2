"""fox: forgetting attention, whose scores fall with what the text says to forget."""

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.attention.call import Call
from hf_linattn.errors import CacheError
from hf_linattn.registry import register

from ._gates import Source, gate_bias, half_lives, per_head, source_of, source_width


@register("fox")
class Fox(Modifier):
    """Forgetting attention: each token says how much is left of the weights of all tokens before it.

    s'_ij = s_ij + sum_{l=j+1}^{i} log f_l,  f_l = sigmoid(w_h . x_l + b_h)

    One gate f per query head and token. x_l is the hidden state that the module gets, or the value. At the
    start w = 0, and b is such that a token counts half after `half_life` tokens. Padding forgets nothing.
    The cache keeps the gates of past tokens beside their keys, in float32; with source="value" there is
    nothing to keep.

    Options:
        source: x_l, "hidden" (default), the module's input; "value", the head's value, for modules that are
            not given a hidden state, and for caches that can keep no gates (paged, quantised).
        half_life: tokens after which a past token counts half, at the start; at least 1, default 16384.
        shortest: tokens; heads then start with different half-lives, from this one to `half_life` in equal
            ratios; at least 1, default None for the same in all heads.

    Use: where there is something to train on, for contexts that hold what is no longer of use: alibi's decay,
        but the text sets its pace. With any attention over scores; "softmax1+fox" may forget everything, and
        "fox+nope" is the paper's, where gates alone tell what is near.

    Source: "Forgetting Transformer: Softmax Attention with a Forget Gate", Lin et al. 2025,
        arXiv:2503.02130, section 3.
    """

    directions = "causal"
    direction_reason = "forgetting has one direction, from past to future"

    def __init__(
        self,
        site: AttentionSite,
        *,
        source: Source = "hidden",
        half_life: float = 16384.0,
        shortest: float | None = None,
    ) -> None:
        super().__init__(site)
        [heads] = site.require("heads", reason="and each has a gate")
        self.source = source
        self.needs_hidden = self.keeps_gates = source == "hidden"
        self.gates_by_value = source == "value"
        self.width = source_width(site, source)
        self.weight = nn.Parameter(torch.zeros(heads, self.width))
        self.bias = nn.Parameter(gate_bias(half_lives(heads, shortest, half_life), temperature=1.0))

    def log_gates(self, call: Call) -> Tensor:
        """Return log f_l of every key, `[B, H, S]`."""
        x = source_of(call, self.source, self.width)
        groups = x.shape[1]
        logits = per_head(x, self.weight.unflatten(0, (groups, -1)), self.bias.unflatten(0, (groups, -1)))
        gates = nn.functional.logsigmoid(logits.transpose(2, 3).flatten(1, 2))
        if call.gates is not None:
            gates = call.gates.with_past(gates, call.where)
        keys = call.key.shape[2]
        if gates.shape[2] < keys:
            raise CacheError(
                f"{call.where}: {keys} keys, and gates of {gates.shape[2]}. Start from a new cache, or patch "
                "with options={'source': 'value'}"
            )
        return gates[:, :, :keys]  # a static layer in place of a window is longer than the mask
