"""temperature: a learned factor per head on the scores."""

import math

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("temperature")
class Temperature(Modifier):
    """A learned factor per head on the scores, so that each head finds its own sharpness.

    s'_ij = exp(t_h) s_ij,  t_h learned, one number per query head

    The factor is an inverse temperature: above 1 it sharpens. The query carries it, so it comes before a
    model's own softcap and leaves its sinks alone. It starts at 1: the model starts as the original.

    Options:
        init: the factor at the start; any number above 0, default 1.

    Use: beside a change that alters the size of scores (unscaled, relu2, rope=False), or to see which heads
        want to be sharper.

    Source: none of its own; a softmax temperature as a weight.
    """

    def __init__(self, site: AttentionSite, *, init: float = 1.0) -> None:
        super().__init__(site)
        if not 0 < init < math.inf:
            raise OptionError(f"init must be a number above 0, got {init}")
        [heads] = site.require("heads", reason="and each has a temperature")
        self.init = init
        self.log_factor = nn.Parameter(torch.full((heads,), math.log(init)))

    def query_scale(self, visible: Tensor) -> Tensor:
        """exp(t_h), `[H, 1]`."""
        return self.log_factor.to(visible.dtype).exp()[:, None]
