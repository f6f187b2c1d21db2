"""logn: scores scaled by the logarithm of the number of visible keys."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("logn")
class Logn(Modifier):
    """Log-n scaling: scores times log(n) / log(train_length), so that entropy stays put as the context grows.

    s'_ij = s_ij log(n_i) / log(train_length), n_i the number of keys that query i sees: padding, other
    documents and keys outside the window do not count. With `kappa` the factor is kappa log(n_i). The query
    carries the factor, so it comes before a model's own softcap and leaves its sinks alone.

    Options:
        train_length: tokens at which the factor is 1, at least 2, default 512; "config" takes the model's
            max_position_embeddings.
        kappa: the factor per log n, any number above 0, instead of 1 / log(train_length); or "learned", one
            per query head that starts at 1 / log(train_length), which is SSMax.
        clip: hold the factor at 1 or more, as Qwen does: nothing changes inside the training length (default
            false).

    Use: for contexts beyond the training length; with "learned" where there is something to train on.

    Source: Su 2021, kexue.fm/archives/8823 (512); "Overcoming a Theoretical Limitation of Self-Attention",
        Chiang and Cholak 2022, arXiv:2202.12172; Qwen's logn_attn (clip); "Scalable-Softmax Is Superior for
        Attention" (SSMax, learned), Nakanishi 2025, arXiv:2501.19399.
    """

    def __init__(
        self,
        site: AttentionSite,
        *,
        train_length: int | Literal["config"] = 512,
        kappa: float | Literal["learned"] | None = None,
        clip: bool = False,
    ) -> None:
        super().__init__(site)
        length = train_length
        if length == "config":
            if site.max_positions is None:
                raise OptionError(
                    f"{site.name}: its config has no max_position_embeddings; give train_length in tokens"
                )
            length = site.max_positions
        if length < 2:
            raise OptionError(f"train_length must be at least 2 tokens, got {length}")
        self.clip = clip
        self.factor = 1 / math.log(length)
        if kappa == "learned":
            [heads] = site.require("heads", reason="and each has a kappa")
            self.kappa = nn.Parameter(torch.full((heads,), self.factor))
        elif kappa is not None:
            if not (math.isfinite(kappa) and kappa > 0):
                raise OptionError(f'kappa must be a positive number or "learned", got {kappa}')
            if train_length != 512:
                raise OptionError("kappa and train_length say the same thing twice: give one of them")
            self.factor = float(kappa)
        self.learned = kappa == "learned"

    def query_scale(self, visible: Tensor) -> Tensor:
        """Kappa log(n_i); rows that see nothing count as one key."""
        factor = self.kappa.to(visible.dtype)[:, None] if self.learned else self.factor
        scale = factor * visible.clamp(min=1).log()
        return torch.clamp(scale, min=1.0) if self.clip else scale
