"""lsh: softmax over the keys that a random hash puts near the query."""

from dataclasses import replace

import torch
from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, SINKS, AttentionSite, Call, Output, ScoreAttention, upcast
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

TINY = 1e-30


@register("lsh")
class Lsh(ScoreAttention):
    """Reformer's hashing: a query sees the keys that fall into its bucket in any of some rounds.

    o_i = sum_{j in V(i)} exp(s_ij) v_j / sum_{j in V(i)} exp(s_ij),  h_r(x) = argmax [x R_r; -x R_r]
    V(i) = {j visible: h_r(q_i) = h_r(k_j) in a round r} and i itself

    The softmax is over the union, so a key that several rounds find counts once (Reformer's exact form). R_r
    is random, one set of rotations a layer, saved with the model. The number of buckets does not follow n, or
    a decoded token would be hashed otherwise than in the prompt; cached keys are hashed again at each call.
    This implementation masks: the pattern can be studied, its speed is not gained. In 16 bits rounded queries
    and keys fall into other buckets here and there, and such a row's output is another one.

    With `shared` one vector of a token is both query and key: the direction of its key, which the cache
    keeps; its query gives the length alone: q_i = |q_i| k_i / |k_i|, and keys are sqrt(D) k_j / |k_j|. Where
    query and key are the same projection that is Reformer's s_ij = q_i . q_j / |q_j|. A token then sees
    itself only where it sees nothing else.

    Options:
        buckets: hash values in a round; even, at least 2, default 16.
        rounds: hashes; at least 1, default 4. More rounds see more keys and come closer to softmax.
        shared: queries and keys share their direction, default False; changes a trained model much more.
        seed: of the rotations, default 0; layers differ.

    Use: to study how a model fares when each query sees only keys of its own direction. Without `shared`
        trained queries and keys lie in different directions, and few pairs meet.

    Source: "Reformer", Kitaev et al. 2020, arXiv:2001.04451, section 2; rotations of Andoni et al. 2015,
        arXiv:1509.02897.
    """

    group = "sparse"
    cross = False
    windowed = False
    supports = (SCORE_EXTRAS | SINKS) - {"indices", "attention_mask"}
    rotations: Tensor

    def __init__(
        self, site: AttentionSite, *, buckets: int = 16, rounds: int = 4, shared: bool = False, seed: int = 0
    ) -> None:
        super().__init__(site)
        if buckets < 2 or buckets % 2:
            raise OptionError(f"buckets must be an even number of at least 2, got {buckets}")
        if rounds < 1:
            raise OptionError(f"rounds must be at least 1, got {rounds}")
        if seed < 0:
            raise OptionError(f"seed must be at least 0, got {seed}")
        [head_dim] = site.require("head_dim", reason="so its vectors cannot be hashed")
        self.shared = shared
        generator = torch.Generator().manual_seed(seed * 1_000_003 + (site.layer_idx or 0))
        shape = (rounds, head_dim, buckets // 2)
        rotations = torch.randn(shape, generator=generator, device="cpu")
        # rounded: models in half precision then hash by the very same rotations
        self.register_buffer("rotations", rotations.bfloat16().float())

    def attend(self, call: Call) -> Output:
        """Compute softmax, in shared mode of other queries and keys."""
        return super().attend(self._shared(call) if self.shared else call)

    def _shared(self, call: Call) -> Call:
        key = upcast(call.key)
        key = key / torch.linalg.vector_norm(key, dim=-1, keepdim=True).clamp_min(TINY)
        own = self._own(call, key).repeat_interleave(call.query.shape[1] // key.shape[1], 1)
        query = own * torch.linalg.vector_norm(upcast(call.query), dim=-1, keepdim=True)
        key = key * key.shape[-1] ** 0.5
        return replace(call, query=query.to(call.query.dtype), key=key.to(call.key.dtype))

    def _own(self, call: Call, x: Tensor) -> Tensor:
        """Select the queries' own tokens: `[B, Hkv, S, D]` -> `[B, Hkv, N, D]`."""
        if call.query.shape[2] == x.shape[2]:
            return x
        # after a cached past: the last key that a query sees is its own
        index = torch.arange(x.shape[2], device=x.device)
        column = torch.where(call.mask()[:, :1], index, 0).amax(-1).unsqueeze(-1)
        return x.gather(2, column.expand(*x.shape[:2], -1, x.shape[3]))

    def select(self, call: Call) -> Tensor:
        """Choose the keys that share a bucket with the query, `[B, H, N, S]`."""
        key = self._hashes(call.key)
        # rounding the rescaled query to half precision could move it to another bucket than its own key
        query = self._own(call, key) if self.shared else self._hashes(call.query)
        heads = call.query.shape[1]
        query, key = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
        chosen = query[..., None, 0] == key[..., None, :, 0]
        for turn in range(1, key.shape[3]):
            chosen = chosen | (query[..., None, turn] == key[..., None, :, turn])
        itself = (call.distance() == 0)[:, None]
        if not self.shared:
            return chosen | itself
        others = chosen & ~itself
        return others | (itself & ~(others & call.mask()).any(-1, keepdim=True))

    def _hashes(self, x: Tensor) -> Tensor:
        """Hash each vector to its bucket in each round: `[B, H, N, D]` -> `[B, H, N, rounds]`."""
        x = upcast(x)
        rotated = torch.einsum("bhnd,rdc->bhnrc", x, self.rotations.to(x.dtype))
        return torch.cat([rotated, -rotated], -1).argmax(-1)
