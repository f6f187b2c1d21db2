"""sandwich: scores biased by the inner product of sinusoidal positions."""

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

NO_FLOAT64 = ("mps",)
"""Devices, Apple's GPUs, on whose behalf the CPU computes angles."""


@register("sandwich")
class Sandwich(Modifier):
    """Sandwich: scores biased by the inner product of sinusoidal positions; no parameters.

    s'_ij = s_ij + (p_i . p_j - p_i . p_i) / c_h,  c_h = 8 h / H, h = 1..H
    p_i . p_j = sum_t cos((i - j) / 10000^(2t / size)), t = 0..size/2 - 1

    It falls about as the logarithm of the distance. Taking p_i . p_i = size / 2 off changes nothing in
    softmax, and keeps the bias at 0 or below for other weights. Distances count visible tokens: padding and
    other documents do not.

    Options:
        size: dimension of the positions, an even number of at least 2; default 128, the paper's.
        rope: true (default) leaves the model's rotary embedding in place; false switches it off.

    Use: as alibi, where more of what is far should remain and nothing can be trained.

    Source: "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis", Chi et al.
        2022, arXiv:2212.10356, section on Sandwich and its code.
    """

    group = "position"
    takes_own_heads = True

    def __init__(self, site: AttentionSite, *, size: int = 128, rope: bool = True) -> None:
        super().__init__(site)
        if size < 2 or size % 2:
            raise OptionError(f"size must be an even number of at least 2, got {size}")
        [self.heads] = site.require("heads", reason="and each has a compression")
        self.size, self.rope = size, rope

    def score_bias(self, distance: Tensor) -> Tensor:
        """Looked up by distance: cosines of every pair would cost size times as much."""
        device = torch.device("cpu") if distance.device.type in NO_FLOAT64 else distance.device
        table = self.products(distance.shape[-1], device).to(distance.dtype).to(distance.device)
        head = torch.arange(1, self.heads + 1, dtype=distance.dtype, device=distance.device)[self.query_heads]
        bias = table[distance.abs().long()]  # below the number of keys
        return bias[:, None] * (self.heads / (8 * head))[:, None, None]

    def products(self, length: int, device: torch.device) -> Tensor:
        """p_0 . p_d - p_0 . p_0 by distance d below a length; float64, as angles of far tokens are large."""
        distances = torch.arange(length, dtype=torch.float64, device=device)
        total = torch.full_like(distances, -self.size / 2)
        for t in range(self.size // 2):
            total += (distances * 10000 ** (-2 * t / self.size)).cos()
        return total
