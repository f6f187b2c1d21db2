"""Models with patches of scores."""

from __future__ import annotations

import torch

from helpers.properties import learned
from helpers.tiny_models import tokens
from hf_linattn import patch_model, unpatch_model


@torch.no_grad()
def logits(model, spec=None, ids=None, **options):
    ids = tokens(2, 40) if ids is None else ids
    if spec is None:
        return model(ids, use_cache=False).logits
    patch_model(model, spec, options=options)
    try:
        return model(ids, use_cache=False).logits
    finally:
        unpatch_model(model)


def learned_of(model, spec, **options):
    patch_model(model, spec, options=options)
    weights = learned(model)
    unpatch_model(model)
    return weights
