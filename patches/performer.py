"""performer: linear attention with positive random features, which approximates softmax."""

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import AttentionSite, LinearAttention, Tokens
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops.types import State
from hf_linattn.registry import register

LIMIT = 60.0
"""Exponents of key features lie in +-60.

The reference divides keys by their largest feature, which a causal sum cannot know: a maximum per key would
not divide away, and one over the sequence would look ahead. None is needed: w . x - |x|^2 / 2 is at most
|w|^2 / 2, and above 60 lie only long keys that point along one random direction. Below -60 lie keys of |x|
above 11 or so: the floor makes an average of what float32 would round to 0 / 0. e^60 leaves room for 10^6
keys times 10^3 features times values of 10^3 before float32 ends at e^88. Queries lose their own maximum,
which divides away.
"""


@register("performer")
class Performer(LinearAttention):
    """Linear attention with positive orthogonal random features (FAVOR+): softmax, approximately.

    o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)
    phi(x)_r = exp(w_r . x' - |x'|^2 / 2) / sqrt(m),  x' = x / D^(1/4),  r = 1 .. m
    w_r ~ N(0, I), orthogonal within blocks of D

    On average phi(q) . phi(k) = exp(q . k / sqrt(D)), so the model's own scaling is taken to be 1 / sqrt(D).
    The error falls as 1 / sqrt(m) and rises as exp of the size of queries and keys: good while |x'| is a few
    units. The projection is one per module, saved with the weights.

    Options:
        features: m, at least 1; default None for twice the head dimension.
        redraw: forwards in training after which a new projection is drawn, 0 or more; default 0, never.
        seed: of the projections, 0 or more, default 0; each module has its own.

    Use: to keep a softmax model's behaviour without new weights, where its queries and keys are small; with
        fine-tuning in any case, and `redraw` there if it gets stuck on one projection.

    Source: "Rethinking Attention with Performers", Choromanski et al. 2020, arXiv:2009.14794, sections 2.3
        (lemma 1) and 2.4 (orthogonal features).
    """

    projection: Tensor
    step: Tensor

    def __init__(
        self, site: AttentionSite, *, features: int | None = None, redraw: int = 0, seed: int = 0
    ) -> None:
        super().__init__(site)
        if features is not None and features < 1:
            raise OptionError(f"features must be at least 1, got {features}")
        if redraw < 0:
            raise OptionError(f"redraw must be 0 or a number of forwards, got {redraw}")
        if seed < 0:
            raise OptionError(f"seed must be 0 or more, got {seed}")
        [head_dim] = site.require("head_dim", reason="so it can have no features")
        self.features: int = 2 * head_dim if features is None else features
        self.redraw = redraw
        self.seed = f"{seed} {site.name}"
        self.register_buffer("projection", drawn(self.features, head_dim, self.seed))
        if redraw:
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def sums(self, tokens: Tokens, state: State | None, divide: bool = False) -> tuple[Tensor, Tensor, State]:
        """Sum over the past; a state keeps the projection that it was summed with."""
        if state is None:
            self._count()
        return super().sums(tokens, state, divide)

    def bidirectional(self, tokens: Tokens) -> Tensor:
        """Let every query read the sum of all keys."""
        self._count()
        return super().bidirectional(tokens)

    def _count(self) -> None:
        """Count a forward in training, and draw a new projection where it is due."""
        if not (self.redraw and self.training):
            return
        if torch.compiler.is_compiling():
            raise UnsupportedCallError(
                "a compiled graph keeps its projection: train 'performer' eagerly, or with redraw=0"
            )
        if torch._C._current_graph_task_id() != -1:
            return  # in a backward: gradient checkpointing must see what the first run saw
        self.step = self.step + 1
        number, rest = divmod(int(self.step), self.redraw)
        if rest == 0:  # not in place: an earlier forward may still need the old one for its backward
            new = drawn(self.features, self.projection.shape[1], f"{self.seed} {number}")
            self.projection = new.to(self.projection)

    def query_map(self, query: Tensor) -> Tensor:
        """Map queries to phi(q) over its largest feature."""
        exponent = self._projected(query)
        features: Tensor = (exponent - exponent.detach().amax(-1, keepdim=True)).exp()
        return features

    def query_log_scale(self, query: Tensor) -> Tensor:
        """The maximum, exp(-|q'|^2 / 2), and 1 / m of queries and keys together."""
        norm = query.square().sum(-1) * (0.5 * query.shape[-1] ** -0.5)
        factor: Tensor = self._projected(query).detach().amax(-1) - norm - math.log(self.features)
        return factor

    def key_map(self, key: Tensor) -> Tensor:
        """Map keys to phi(k) without the constant 1 / sqrt(m), which divides away."""
        norm = key.square().sum(-1, keepdim=True) * (0.5 * key.shape[-1] ** -0.5)
        features: Tensor = F.hardtanh(self._projected(key) - norm, -LIMIT, LIMIT).exp()
        return features

    def _projected(self, x: Tensor) -> Tensor:
        """Compute the exponents w . x', `[B, H, N, m]`."""
        projected: Tensor = x * x.shape[-1] ** -0.25 @ self.projection.to(x.dtype).mT
        return projected


def drawn(features: int, size: int, seed: str) -> Tensor:
    """Draw rows `[m, D]` of the lengths of Gaussian vectors, orthogonal within each block of D."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))  # torch uses 32 bits of a seed

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    basis, upper = torch.linalg.qr(gaussian(-(-features // size), size, size))
    basis = basis * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # so that every basis is as likely
    lengths = gaussian(features, size).norm(dim=-1, keepdim=True)
    rows: Tensor = basis.mT.flatten(0, 1)[:features] * lengths
    return rows.float()
