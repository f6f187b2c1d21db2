"""additive: scores of a small network in place of the dot product."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_linattn.attention import AttentionSite, ScoreAttention, upcast
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

SLICE = 2**24
"""Numbers in one slice of queries x keys x hidden; glibc gives only blocks above 32 MiB back when freed."""


@register("additive")
class Additive(ScoreAttention):
    """Additive (Bahdanau) attention: a one-layer network scores each pair of query and key.

    s_ij = scaling w_h . tanh(W_h q_i + U_h k_j), softmax over j;  W_h, U_h [hidden, d], w_h [hidden] learned

    The factor, 1 / sqrt(d) in most models, is not in the paper; w_h can undo it, and `scaled` has a meaning.
    W_h and U_h start as N(0, 1 / d), w_h as N(0, d / hidden), so that scores start at a size of about 1.

    Computed in slices of queries, and again in the backward pass: memory is that of the scores, O(n^2) per
    head, but time is O(n^2 hidden) without any matrix product.

    Options:
        hidden: size of the network, at least 1; default the head's size.
        seed: of the start, from 0 to 2^31 - 1, default 0; each module has its own.

    Use: to compare scores on small models. It is slow, and the new weights know nothing of the old scores: a
        pretrained model must learn to attend again.

    Source: "Neural Machine Translation by Jointly Learning to Align and Translate", Bahdanau et al. 2014,
        arXiv:1409.0473, appendix A.1.2.
    """

    time = "O(n^2 hidden)"

    def __init__(self, site: AttentionSite, *, hidden: int | None = None, seed: int = 0) -> None:
        super().__init__(site)
        if hidden is not None and hidden < 1:
            raise OptionError(f"hidden must be at least 1, got {hidden}")
        heads, head_dim = site.require("heads", "head_dim", reason="and W needs it")
        self.hidden = size = head_dim if hidden is None else hidden
        generator = site.generator(seed)

        def drawn(variance: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, device="cpu") * variance**0.5)

        self.query_weight = drawn(1 / head_dim, heads, size, head_dim)
        self.key_weight = drawn(1 / head_dim, heads, size, head_dim)
        self.score_weight = drawn(head_dim / size, heads, size)

    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Score slice by slice: `[B, H, N, S]`."""
        query, key = upcast(query), upcast(key)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        left = torch.einsum("bhnd,hed->bhne", query, self.query_weight.to(query.dtype))
        right = torch.einsum("bhsd,hed->bhse", key, self.key_weight.to(key.dtype))
        vector = self.score_weight.to(query.dtype) * scaling
        if torch.compiler.is_compiling():  # the number of slices would be a constant of the graph
            return _pairs(left, right, vector)
        rows = max(1, SLICE // (right.numel() or 1))
        slices = left.split(rows, 2)
        if torch.is_grad_enabled() and len(slices) > 1:
            parts = [checkpoint(_pairs, part, right, vector, use_reentrant=False) for part in slices]
        else:
            parts = [_pairs(part, right, vector) for part in slices]
        return torch.cat(parts, 2)


def _pairs(left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
    """Compute w . tanh(left + right): `[B, H, N, E]`, `[B, H, S, E]`, `[H, E]` -> `[B, H, N, S]`."""
    hidden = (left.unsqueeze(3) + right.unsqueeze(2)).tanh_()
    return torch.einsum("bhnse,he->bhns", hidden, vector)
