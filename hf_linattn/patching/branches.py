"""Which part of a hybrid does the work: its window or its linear attention, each by itself for a while.

    with use_branches(model, "window"):
        model(**batch)

A hybrid is any attention inside the model with an attribute `branches`, such as "window+elu1".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Literal, get_args

from torch import nn

from hf_linattn.errors import OptionError, UnsupportedModelError

Branches = Literal["both", "window", "rest", "linear", "none"]
"""What a hybrid computes with. W(i) are the tokens of query i's window and its sinks.

both    the hybrid as it is
window  softmax over W(i) alone, as the patch "window"
rest    the linear attention as the hybrid uses it: over the tokens outside W(i), divided by a sum of its own;
        0 where there is nothing outside
linear  the linear attention over all tokens that query i sees, as if there were no window; what a linear
        attention that is trained alone computes
none    0
"""


def hybrids(model: nn.Module) -> dict[str, nn.Module]:
    """The attentions of a model that have two branches, by dotted name."""
    found = model.named_modules()
    return {name: module for name, module in found if getattr(module, "branches", None) in get_args(Branches)}


@contextmanager
def use_branches(model: nn.Module, branches: Branches) -> Iterator[None]:
    """While this lasts, all hybrids of a model compute with these branches alone.

    Nothing is copied or saved; weights of a branch that is not used get no gradient. A backward that runs
    forwards again (gradient checkpointing) belongs inside. So does a cache from its first token to its last:
    "linear" sums other tokens than the other branches do.

    Args:
        model: a patched model, or its wrapper, or a part of it.
        branches: "both", "window", "rest", "linear" or "none", see `Branches`.

    Raises:
        OptionError: there are no such branches.
        UnsupportedModelError: no attention of the model is a hybrid.
    """
    known = get_args(Branches)
    if branches not in known:
        near = get_close_matches(str(branches), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"unknown branches {branches!r}.{hint} There are {', '.join(known)}.")
    chosen = list(hybrids(model).values())
    if not chosen:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention with two branches: that is what a window with a linear "
            "attention is, as in patch_model(model, 'window+elu1')"
        )
    before = [module.branches for module in chosen]
    try:
        for module in chosen:
            module.branches = branches  # type: ignore[assignment]
        yield
    finally:
        for module, earlier in zip(chosen, before, strict=True):
            module.branches = earlier
