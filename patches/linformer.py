"""linformer: softmax over a fixed number of learned mixtures of all keys."""

import torch
from torch import Tensor, nn

from hf_linattn.attention import Attention, AttentionSite, Call, Output, upcast
from hf_linattn.errors import OptionError, UnsupportedCallError, UnsupportedMaskError
from hf_linattn.ops.softmax import scores_of, softmax_weights
from hf_linattn.registry import register


@register("linformer")
class Linformer(Attention):
    """Keys and values projected along the sequence to `rank` learned mixtures of tokens; encoders only.

    o_i = sum_r exp(s_ir) w_r / sum_r exp(s_ir),  s_ir = scaling q_i . (sum_j E_rj k_j),  w_r = sum_j F_rj v_j

    E and F `[rank, max_length]` are shared by the heads of a layer. Token j takes the column of its place
    among the visible tokens, so padding does not matter. They start as averages over `rank` equal segments of
    `max_length`; a mixture to which no token of the input belongs (its row is 0 on all of them) is left out.

    Options:
        rank: number of mixtures; 1 to max_length, default 256 or max_length where that is less.
        max_length: tokens that the projections cover; at least 1, default the model's
            max_position_embeddings. A longer input raises.
        shared: one projection for keys and values, E = F, default False.

    Use: encoders on long inputs of a bounded length, after fine-tuning. Adds 2 rank max_length weights a
        layer (half with `shared`), and never works beyond max_length.

    Source: "Linformer", Wang et al. 2020, arXiv:2006.04768, section 4; why there is no causal form: Su 2020,
        kexue.fm/archives/7546.
    """

    group = "compressed"
    time = "O(n)"
    directions = "bidirectional"
    direction_reason = "its projections mix all positions, so that a token would see the future"

    def __init__(
        self,
        site: AttentionSite,
        *,
        rank: int | None = None,
        max_length: int | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(site)
        length = site.max_positions if max_length is None else max_length
        if length is None:
            raise OptionError(
                f"{site.name}: its config has no max_position_embeddings; give max_length in tokens"
            )
        if length < 1:
            raise OptionError(f"max_length must be at least 1 token, got {length}")
        rank = min(256, length) if rank is None else rank
        if not 1 <= rank <= length:
            raise OptionError(f"rank must be from 1 to max_length ({length}), got {rank}")
        segment = torch.arange(length) * rank // length
        member = (segment == torch.arange(rank)[:, None]).float()
        start = member / member.sum(1, keepdim=True)
        self.key_projection = nn.Parameter(start)
        self.value_projection = None if shared else nn.Parameter(start.clone())

    def attend(self, call: Call) -> Output:
        """Compute softmax over the mixtures."""
        if call.output_attentions:
            raise UnsupportedCallError(
                f"{call.where}: output_attentions=True, and {call.spec!r} weighs mixtures, not tokens. "
                "hf_linattn.eval.diagnose shows what each token weighs."
            )
        visible = self._visible(call)
        place = call.ranks()[1]
        self._check_length(call, place)
        columns = self._columns(self.key_projection, place, visible, call)
        # padded tokens may hold NaN, which a weight of 0 would let through
        hidden = ~visible[:, None, :, None]
        key = columns[:, None] @ upcast(call.key).masked_fill(hidden, 0)
        live = (columns != 0).any(-1)[:, None, None]  # [B or 1, 1, 1, rank]
        if self.value_projection is not None:
            columns = self._columns(self.value_projection, place, visible, call)
        value = columns[:, None] @ upcast(call.value).masked_fill(hidden, 0)
        weights = softmax_weights(scores_of(call.query, key, call.scaling), live, None)
        weights = nn.functional.dropout(weights, call.dropout) if call.dropout else weights
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        return (weights @ value).to(call.query.dtype), None

    def _columns(self, projection: Tensor, place: Tensor, visible: Tensor, call: Call) -> Tensor:
        """Select the column of each key, 0 for padding: `[B or 1, rank, S]`."""
        weight = projection.to(upcast(call.key).dtype)
        columns = weight[:, place.clamp(max=weight.shape[1] - 1)].transpose(0, 1)
        return columns.masked_fill(~visible[:, None], 0)

    def _visible(self, call: Call) -> Tensor:
        """Find the keys that count, `[B or 1, S]`."""
        mask = call.mask()
        visible = mask.any(2, keepdim=True)
        if call.visibility.dense is not None and bool(((mask != visible) & mask.any(-1, keepdim=True)).any()):
            raise UnsupportedMaskError(
                f"{call.where}: the attention mask shows different keys to different queries, and "
                f"the mixtures of {call.spec!r} are the same for all: pass a mask of padding alone"
            )
        return visible[:, 0, 0]

    def _check_length(self, call: Call, place: Tensor) -> None:
        length = self.key_projection.shape[1]
        if call.key.shape[2] <= length:
            return
        tokens = call.key.shape[2] if torch.compiler.is_compiling() else int(place.max()) + 1
        if tokens > length:
            raise UnsupportedCallError(
                f"{call.where}: {tokens} tokens, and the projections of {call.spec!r} cover max_length = "
                f"{length}. Shorten the input, or patch with a larger max_length and fine-tune."
            )
