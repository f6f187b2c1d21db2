"""Attentions of linear patches by name, without a model around them."""

from __future__ import annotations

import torch

from helpers import tiny_models
from hf_linattn import patch_model
from hf_linattn.attention import Tokens

SHAPE = (2, 4, 2, 130, 8, 8)  # as the heads of tiny_models.llama


def attention_of(name, dtype=torch.float64, **options):
    """The attention of the only layer of a tiny llama."""
    model = patch_model(tiny_models.llama(1, dtype=dtype), name, options=options)
    return model.model.layers[0].self_attn.linattn.attention


def tokens_of(query, key, value):
    """All visible to those behind them."""
    count = torch.arange(1.0, key.shape[2] + 1)[None]
    return Tokens(query, key, value, query.shape[-1] ** -0.5, count=count)
