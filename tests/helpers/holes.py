"""Rows with padding inside, beside their tokens alone."""

from itertools import pairwise

import torch
from transformers import DynamicCache

from helpers import tiny_models
from helpers.properties import ENCODERS, logits

WIDTH = 48
HOLES = torch.ones(4, WIDTH, dtype=torch.long)
HOLES[0, [0, 1, 5, 6, 7, 20, 31, 32, 47]] = 0
HOLES[1, 10:24] = 0  # longer than the window
HOLES[2, 1::2] = 0
HOLES[2, 40:] = 0
CUTS = {
    "one shot": (0, WIDTH),
    "chunks": (0, 8, 20, 22, WIDTH),  # the second row has a chunk of padding alone
    "decode": (0, 4, *range(5, WIDTH + 1)),
    "prefill, decode": (0, 25, *range(26, 40), WIDTH),
}


def rows():
    """Tokens of all rows, what stands in their padding among them."""
    return tiny_models.tokens(len(HOLES), WIDTH)


@torch.no_grad()
def alone(model, ids):
    """Logits of the visible tokens of each row, without any padding."""
    return torch.cat([logits(model, row[mask == 1][None])[0] for row, mask in zip(ids, HOLES, strict=True)])


@torch.no_grad()
def run(model, ids, cuts, cache=None):
    """Logits of all rows together, through a cache where there are several cuts."""
    positions, found = tiny_models.positions(HOLES), []
    if model.config.model_type in ENCODERS or len(cuts) == 2:
        where = {} if model.config.model_type in ENCODERS else {"use_cache": False}
        return model(ids, attention_mask=HOLES, position_ids=positions, **where).logits
    cache = DynamicCache() if cache is None else cache
    for first, last in pairwise(cuts):
        out = model(
            ids[:, first:last],
            attention_mask=HOLES[:, :last],
            position_ids=positions[:, first:last],
            past_key_values=cache,
        )
        found.append(out.logits)
    return torch.cat(found, 1)
