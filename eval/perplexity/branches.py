"""Which part of a hybrid does the work, its window or its linear attention? Perplexity with each alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_linattn.patching.causality import require_causal
from hf_linattn.patching.contexts import Branches, hybrids, use_branches

from ..common.statistics import Row
from ..common.windows import Bos, Stride, encode, plan_windows
from .arguments import BRANCHES
from .measure import score_length

FORMAT = "hf_linattn.branches/1"
SMALL = 0.01
"""Nats per token, 1 % of perplexity, below which a branch is said to add nothing."""


def compare_branches(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str],
    lengths: Sequence[int],
    *,
    branches: Sequence[Branches] = BRANCHES,
    stride: Stride = 256,
    max_tokens: int | None = 65536,
    batch_size: int = 1,
    bos: Bos = "auto",
    join: bool = False,
    progress: bool = False,
) -> dict[str, list[Row]]:
    """Measure perplexity at every length with each of the branches alone, as `measure.measure` does.

    Args:
        model: a causal language model with hybrids ("window+elu1"); left unchanged.
        tokenizer: its tokenizer.
        documents: one string per document.
        lengths: tokens per window of text.
        branches: what to measure, see `hf_linattn.patching.contexts`.
        stride: scored tokens per window of text, or "full".
        max_tokens: scored tokens per length; None takes all.
        batch_size: windows of text per forward pass.
        bos: "auto", "yes", "no" or "window".
        join: one document of all.
        progress: show bars on stderr.

    Raises:
        UnsupportedModelError: no attention of the model is a hybrid, or it is an encoder.
        OptionError: unknown branches, or a number out of its range.
        DataError: no document is long enough, or the loss is not finite.
    """
    texts = encode(tokenizer, documents, bos=bos, join=join)
    plan = plan_windows(texts, lengths, stride=stride, max_tokens=max_tokens)
    require_causal(model)
    settings: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    rows: dict[str, list[Row]] = {}
    for name in branches:
        with use_branches(model, name):
            rows[name] = [score_length(model, plan, length, **settings) for length in plan.lengths]
    return rows


@contextmanager
def use_each(model: nn.Module, branches: Branches) -> Iterator[nn.Module]:
    """Give the model while its hybrids compute with these branches alone."""
    with use_branches(model, branches):
        yield model


def window_sizes(model: nn.Module) -> list[int]:
    """Tell the tokens in the windows of a model's hybrids, each size once.

    Raises:
        UnsupportedModelError: no attention of the model is a hybrid.
    """
    with use_branches(model, "both"):
        modules: list[Any] = list(hybrids(model).values())
        return sorted({module.size for module in modules if hasattr(module, "size")})


def sentences(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[str]:
    """Say what "nats" by "length" and "model" (the branches) mean, for windows of these sizes.

    A sentence per length; nothing where one of the four branches is not measured.
    """
    nats = {(row["model"], row["length"]): row["nats"] for row in rows}
    lines = []
    for length in sorted({row["length"] for row in rows}):
        four = [nats.get((name, length)) for name in ("both", "window", "rest", "none")]
        if None not in four:
            outside = not sizes or length > sizes[0]
            lines.append(f"at {length} tokens {_meaning(*four, outside=outside)}")  # type: ignore[arg-type]
    return lines


def _meaning(both: float, window: float, rest: float, none: float, *, outside: bool) -> str:
    if not outside:
        return "nothing lies outside the window: the linear attention has nothing to do"
    alone = {"window": window - both, "linear attention": rest - both}
    best = min(alone, key=lambda name: alone[name])
    if alone[best] < -SMALL:
        other = "linear attention" if best == "window" else "window"
        return (
            f"the {best} alone is better than both, by {-alone[best]:.3f} nats per token: the {other} harms"
        )
    worth = none - both
    if worth <= SMALL:
        return f"attention is worth nothing: without it there are {worth:+.3f} nats per token"
    shares = [f"{(none - nats) / worth:.0%}" for nats in (window, rest)]
    start = f"attention is worth {worth:.3f} nats per token; the window alone keeps {shares[0]} of that, the "
    start += f"linear attention alone {shares[1]}: "
    if alone["window"] <= SMALL:
        return start + "beside the window the linear attention adds nothing"
    if alone["linear attention"] <= SMALL:
        return start + "beside the linear attention the window adds nothing"
    return start + f"beside the window the linear attention is worth {alone['window']:.3f} nats"
