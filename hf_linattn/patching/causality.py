"""Check that a model does not see later tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_linattn.errors import UnsupportedModelError

PROBE = 16
"""Tokens that tell whether a model sees later ones."""


def require_causal(model: nn.Module) -> None:
    """Refuse a model that sees later tokens: it can copy the next one instead of predicting it.

    Tested by the gradient of the first token's logits with respect to the embeddings of the later ones, which
    is exactly 0 for a causal model, in every precision. A model that refuses gradients in evaluation mode
    passes, and one whose embeddings are offloaded.

    Raises:
        UnsupportedModelError: it sees them (an encoder), it is an encoder-decoder, or gives no logits.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder: it answers a text rather than continuing it. "
            "Models that continue texts, and encoders, are trained and measured here"
        )
    leaves: list[Tensor] = []

    def watch(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().requires_grad_())
        return leaves[-1].clone()  # some models scale it in place

    table = cast("Any", model).get_input_embeddings()
    if table.weight.is_meta:
        return
    ids = torch.arange(PROBE, device=table.weight.device)[None] % len(table.weight)
    handle = table.register_forward_hook(watch)
    was_training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
            if logits is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} gives no logits, so it predicts no tokens: load a class with a "
                    "language-model head"
                )
            gradients = torch.autograd.grad(logits[0, 0].float().sum(), leaves, allow_unused=True)
    except AssertionError:  # reversible layers (Reformer) have no gradients outside training: not tested
        return
    finally:
        handle.remove()
        model.train(was_training)
    if any(bool((gradient[0, 1:].abs() > 0).any()) for gradient in gradients if gradient is not None):
        raise UnsupportedModelError(
            f"{type(model).__name__} sees later tokens, so it can copy the next one instead of predicting "
            "it: an encoder is trained and measured on masked tokens (finetune --objective mlm); for a "
            "decoder set is_decoder in config.json"
        )
