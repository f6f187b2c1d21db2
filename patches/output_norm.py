"""output_norm: the output of each head divided by its root mean square."""

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier, upcast
from hf_linattn.attention.call import Call
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("output_norm")
class OutputNorm(Modifier):
    """RMS norm of the output of each head, in place of a denominator.

    o'_i = g_h * o_i / sqrt(mean_d o_id^2 + eps), g_h `[Dv]` learned, 1 at the start

    A sum of values that nothing divides grows with the text; divided by its size, only its direction counts.

    Options:
        eps: added to the mean square, any number above 0, default 1e-6.

    Use: behind a state without denominator (`decay` with normalise="none", `delta`). A pretrained model's
        output projection expects outputs of another size at the start: it needs training.

    Source: "Retentive Network", Sun et al. 2023, arXiv:2307.08621, section 2.2 (GroupNorm of the heads); as
        RMS norm: "The Devil in Linear Transformer", Qin et al. 2022, arXiv:2210.10340; HALO,
        arXiv:2601.22156.
    """

    def __init__(self, site: AttentionSite, *, eps: float = 1e-6) -> None:
        super().__init__(site)
        if not 0 < eps < float("inf"):
            raise OptionError(f"eps must be a number above 0, got {eps}")
        heads, value_dim = site.require("heads", "value_dim", reason="so its norm has no size")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, value_dim))

    def output(self, call: Call, output: Tensor) -> Tensor:
        """Normalise `[B, H, N, Dv]`."""
        wide = upcast(output)
        size = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * size * self.weight.to(wide)[:, None]).to(output.dtype)
