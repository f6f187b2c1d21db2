"""logn: scores scaled by the logarithm of the number of visible keys."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

SLOPE = 0.1


@register("logn")
class Logn(Modifier):
    """Log-n scaling: scores times log(n) / log(train_length), so that entropy stays put as the context grows.

    s'_ij = s_ij log(n_i) / log(train_length), n_i the number of keys that query i sees: padding, other
    documents and keys outside the window do not count. With `kappa` the factor is kappa log(n_i). The query
    carries the factor, so it comes before a model's own softcap and leaves its sinks alone.

    Options:
        form: the factor, with N = train_length and a = slope. "log" (default), log n / log N; "sqrt", its
            root; as models ship it: "llama4", 1 + a log(1 + floor(n / N)); "ministral3",
            1 + a log(1 + floor((n - 1) / N)); "inkling", 1 + a log(max(1, n / N)), without steps.
        train_length: tokens N at which the factor is 1, or begins to grow, at least 2, default 512; "config"
            takes the model's max_position_embeddings.
        slope: a of the forms that have one, any number above 0; default None for 0.1, as they ship.
        kappa: the factor per log n, any number above 0, instead of 1 / log(train_length); or "learned", one
            per query head that starts at 1 / log(train_length), which is SSMax.
        clip: hold the factor at 1 or more, as Qwen does: nothing changes inside the training length (default
            false).

    Use: for contexts beyond the training length; with "learned" where there is something to train on. The
        shipped forms change nothing inside the training length.

    Source: Su 2021, kexue.fm/archives/8823 (512); "Overcoming a Theoretical Limitation of Self-Attention",
        Chiang and Cholak 2022, arXiv:2202.12172; Qwen's logn_attn (clip); "Scalable-Softmax Is Superior for
        Attention" (SSMax, learned), Nakanishi 2025, arXiv:2501.19399. "llama4", "ministral3", "inkling": the
        models of these names in transformers.
    """

    def __init__(
        self,
        site: AttentionSite,
        *,
        form: Literal["log", "sqrt", "llama4", "ministral3", "inkling"] = "log",
        train_length: int | Literal["config"] = 512,
        kappa: float | Literal["learned"] | None = None,
        clip: bool = False,
        slope: float | None = None,
    ) -> None:
        super().__init__(site)
        shipped = form not in ("log", "sqrt")
        if form != "log" and (kappa is not None or clip):
            raise OptionError(f"kappa and clip belong to form='log', not to {form!r}: leave them out")
        if slope is not None and not (shipped and 0 < slope < math.inf):
            raise OptionError(
                f"slope must be a positive number, with form llama4, ministral3 or inkling, got {slope} "
                f"with {form!r}"
            )
        self.form, self.slope = form, SLOPE if slope is None else slope
        length = train_length
        if length == "config":
            if site.max_positions is None:
                raise OptionError(
                    f"{site.name}: its config has no max_position_embeddings; give train_length in tokens"
                )
            length = site.max_positions
        if length < 2:
            raise OptionError(f"train_length must be at least 2 tokens, got {length}")
        self.length, self.clip = length, clip
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
        """Return the factor of each query; rows that see nothing count as one key."""
        if self.form not in ("log", "sqrt"):
            return 1 + self.slope * self._beyond(visible.clamp(min=1)).log()
        factor = self.kappa.to(visible.dtype)[:, None] if self.learned else self.factor
        scale = factor * visible.clamp(min=1).log()
        if self.form == "sqrt":
            return scale.sqrt()
        return torch.clamp(scale, min=1.0) if self.clip else scale

    def _beyond(self, n: Tensor) -> Tensor:
        """Count training lengths, as the form does."""
        if self.form == "inkling":
            return (n / self.length).clamp(min=1)
        return 1 + ((n if self.form == "llama4" else n - 1) / self.length).floor()
