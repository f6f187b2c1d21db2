"""t2r: linear attention with a learned feature map relu(W x + b)."""

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

from ._feature_maps import clamp_floor

FLOOR = 1e-12
"""Least feature, as in LoLCATs' code: a query that shares none with any key averages, in place of 0 / 0."""


@register("t2r")
class T2R(LinearAttention):
    """Linear attention with a learned map phi(x) = relu(W x + b) per head, the same for queries and keys.

    o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j),  W `[Hkv, F, D]`, b `[Hkv, F]`

    Query heads that share a key share its map. W starts as orthogonal directions and their opposites, b as 0:
    every token then has some feature above 0, and phi(q) . phi(k) grows with q . k. Features are held above
    1e-12.

    Options:
        features: F, at least 2; default None for the head dimension.
        frozen: True keeps the map as it starts, random, for a floor in comparisons; default False.

    Use: to trade quality for speed and memory: few features make a small state. Wants fine-tuning.

    Source: "Finetuning Pretrained Transformers into RNNs", Kasai et al. 2021, arXiv:2103.13076, section 2.2.
    """

    def __init__(self, site: AttentionSite, *, features: int | None = None, frozen: bool = False) -> None:
        super().__init__(site)
        if features is not None and features < 2:
            raise OptionError(f"features must be at least 2, got {features}")
        head_dim, heads = site.require("head_dim", "kv_heads", reason="so it can have no learned map")
        self.features = count = head_dim if features is None else features
        generator, shape = site.generator(), (heads, (count + 1) // 2, head_dim)
        half = torch.empty(shape, dtype=torch.float32, device="cpu")
        for head in half:
            nn.init.orthogonal_(head, generator=generator)
        self.weight: Tensor
        self.bias: Tensor
        start = {
            "weight": torch.cat([half, -half], 1)[:, :count].contiguous(),
            "bias": torch.zeros(heads, count),
        }
        for name, tensor in start.items():
            if frozen:
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor))

    def feature_map(self, x: Tensor) -> Tensor:
        """max(W x + b, 1e-12)."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        x = x.unflatten(1, (weight.shape[0], -1))
        x = torch.einsum("bhgnd,hfd->bhgnf", x, weight) + bias[:, None, None]
        return clamp_floor(x, FLOOR).flatten(1, 2)
