"""Split the rows of a model over processes for a `with` block, once it is known that this changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_linattn.attention.site import AttentionSite
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.parallel import Shard, row_part
from hf_linattn.patching.heads import processes_of
from hf_linattn.patching.installation import installation_of
from hf_linattn.patching.interface import NAME, SHARD, UNPATCHED_IMPL
from hf_linattn.patching.plan import sites_of, transformers_model

PROBE = 16
"""Tokens of each process in the row that is computed both ways, at least."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Of the logits, over the largest; 0.1 for narrower dtypes."""
COUNTING = ("attn_temperature_tuning", "log_scaling_n_floor")
"""Entries of configs by which models scale queries far into a row; some count from their cache."""
MOVING = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the text, of which a process sees a part."""


@contextmanager
def split_rows(model: nn.Module, shard: Shard) -> Iterator[None]:
    """Let a patched model read a part of each row, after what the processes before have read.

    All processes of the group must enter, and then run the model alike: with the token ids and positions of
    `hf_linattn.parallel.row_part`, `use_cache=False`, and neither padding nor packed documents.

    Args:
        model: a patched causal model, or its wrapper; the same weights in all processes.
        shard: which part this process has.

    Raises:
        UnsupportedModelError: naming the layers that need whole rows, and what to do instead; or the logits
            of a short row are others when it is split.
    """
    inside: Any = transformers_model(model)
    sites = _checked_sites(inside)
    owners = [(site.module._modules.get(NAME), site.module) for site in sites]

    def put(value: Shard | None) -> None:
        for child, module in owners:
            if child is not None:
                child.shard = value  # type: ignore[assignment]
            else:
                module.__dict__[SHARD] = value

    try:
        compare = _probed(inside, shard, put, sites)
        put(shard)
        compare()
        yield
    finally:
        put(None)
        for child, module in owners:
            if child is None:
                module.__dict__.pop(SHARD, None)


def _checked_sites(model: Any) -> list[AttentionSite]:
    """List the attention modules of a model whose rows can be split.

    Raises:
        UnsupportedModelError: they cannot.
    """
    kind = type(model).__name__
    sites = sites_of(model)
    if installation_of(model) is None or not any(map(_is_routed, sites)):
        names = ", ".join(site.name for site in sites)
        raise UnsupportedModelError(
            f"{kind} is not patched, and the attention of transformers needs whole rows in one process "
            f"({names}): patch it, some layers at least, or run it in one process"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{kind} takes no position_ids, so nothing tells it where in the row a part begins: run it in "
            "one process"
        )
    if processes_of(model) is not None:
        raise UnsupportedModelError(
            f"the heads of {kind} are shared by processes, which all need the same rows: load it without "
            "tp_plan, or leave rows whole"
        )
    config = model.config.get_text_config()
    if counts := [name for name in COUNTING if getattr(config, name, None)]:
        raise UnsupportedModelError(
            f"{kind} scales its queries by their number ({counts[0]}), counted in each process by itself: "
            "run it in one process"
        )
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        moving = set(types.values() if isinstance(types, dict) else [types]) & set(MOVING)
        if moving:
            raise UnsupportedModelError(
                f"{kind} scales its RoPE by the length of the row ({moving.pop()}), of which each process "
                "sees a part: take yarn or linear scaling, or run it in one process"
            )
    reasons: dict[str, list[str]] = {}
    for site in sites:
        if reason := _whole_rows(site):
            reasons.setdefault(reason, []).append(site.name)
    if reasons:
        text = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise UnsupportedModelError(
            f"rows of {kind} cannot be split over processes, for some layers need them whole ({text}). Give "
            "these layers a linear patch, a window or softmax in the plan, or run it in one process"
        )
    return sites


def _is_routed(site: AttentionSite) -> bool:
    return NAME in site.module._modules or hasattr(site.module, UNPATCHED_IMPL)


def _whole_rows(site: AttentionSite) -> str:
    child: Any = site.module._modules.get(NAME)
    if site.causal is False:
        return "it is not causal"
    if site.window is not None and (child is None or child.keep_window):
        return "its sliding or chunked window is the model's own; patch it with sliding='global'"
    return "" if child is None else child.whole_rows()


def _probed(model: Any, shard: Shard, put: Any, sites: list[AttentionSite]) -> Any:
    """Compute a short row as a whole; what comes back compares it with the row when it is split."""
    children: list[Any] = [site.module._modules.get(NAME) for site in sites]
    each = max([PROBE, *(getattr(child.attention, "sinks", 0) for child in children if child is not None)])
    table = model.get_input_embeddings().weight
    ids = torch.arange(1, 1 + shard.size * each, device=table.device)[None] * 31 % len(table)
    part = row_part(ids, shard)
    modes = [(module, module.training) for module in model.modules()]

    @torch.no_grad()
    def logits(**inputs: Any) -> torch.Tensor:
        model.eval()
        try:
            result: torch.Tensor = model(use_cache=False, **inputs).logits
            return result
        finally:
            for module, mode in modes:
                module.training = mode

    put(None)
    expected = logits(input_ids=ids)[:, part.start : part.start + each]

    def compare() -> None:
        got = logits(input_ids=part.ids, position_ids=part.position_ids)
        error = (got - expected).abs().double().max() / expected.abs().double().max().clamp_min(1e-30)
        errors = shard.gather(error.nan_to_num(nan=torch.inf))
        largest = float(torch.stack(errors).max())  # all refuse, or none
        if largest > TOLERANCE.get(got.dtype, 0.1):
            raise UnsupportedModelError(
                f"{type(model).__name__} gives other logits for a row that is split over processes, by "
                f"{largest:.1g} of the largest: something besides its attention mixes tokens, or counts "
                "them by itself. Run it in one process"
            )

    return compare
