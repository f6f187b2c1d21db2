"""softmax1: softmax with 1 added to the denominator, or with a sink of another logit."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

START = -10.0


@register("softmax1")
class Softmax1(ScoreAttention):
    """Softmax with 1 added to its denominator, so that a head may attend to nothing.

    o_i = sum_j exp(s_ij) v_j / (exp(b) + sum_j exp(s_ij)),  s_ij = scaling q_i . k_j,  b = 0

    The same as an extra key of logit b and value 0. A model that has sinks b_h of its own keeps them: the
    denominator becomes exp(b) + exp(b_h) + sum. On CPUs torch's kernels compute it without that key;
    elsewhere with a token in front, without a mask.

    A learned b_h per head starts at `init`, low enough for the model to start as the original. Its gradient
    is as small as its share of the attention; AdamW divides that out and moves b_h by up to the learning rate
    per step, as long as gradients stand out from its eps (1e-8): at -10 they just do, at -15 they do not. A
    start nearer to 0 has less way to go, and a model that differs more.

    Options:
        sink: the logit b, any finite number, default 0; or "learned", one per query head.
        init: where a learned b starts; any finite number, default -10.

    Use: against first tokens that swallow attention, and outliers that come with them; with "learned" where
        the patched model should begin as it was.

    Source: "Attention Is Off By One", Miller 2023, evanmiller.org/attention-is-off-by-one.html; learned per
        head as in gpt-oss, OpenAI 2025, arXiv:2508.10925.
    """

    def __init__(
        self, site: AttentionSite, *, sink: float | Literal["learned"] = 0.0, init: float = START
    ) -> None:
        super().__init__(site)
        if not math.isfinite(init):
            raise OptionError(f"init must be a finite number, got {init}")
        self.sink, self.init = sink, init
        if sink == "learned":
            [heads] = site.require("heads", reason="and each has a sink")
            self.logit = nn.Parameter(torch.full((heads,), float(init)))
            return
        if not math.isfinite(float(sink)):
            raise OptionError(f'sink must be a finite number or "learned", got {sink}')
        if init != START:
            raise OptionError('init is where a learned sink starts: give sink="learned" with it')

    def sink_logit(self, query: Tensor) -> Tensor:
        """The logit b: `[]`, `[1]` or `[H]`."""
        if self.sink == "learned":
            return self.logit
        if self.sink == 0:
            return torch.zeros((), dtype=query.dtype, device=query.device)
        return torch.full((1,), float(self.sink), dtype=query.dtype, device=query.device)
