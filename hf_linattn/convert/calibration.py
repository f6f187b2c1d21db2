"""Calibration: a patch whose first weights are computed from what the model's own attention does.

A state that forgets learns little before it forgets at the right rate. Rates are tried out on the queries,
keys and values of a little text, against the outputs of the attention that is replaced. What is tried is the
patch's own (`StatefulAttention.calibrate`); nothing is trained.

(Gates from the statistics of a teacher: "Taylor-Calibrate", arXiv:2606.16429.)
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_linattn.attention import StatefulAttention, Tokens
from hf_linattn.convert.patch_hook import PatchHook, computing_by
from hf_linattn.patching.contexts import bypassed
from hf_linattn.patching.interface import NAME, native_attention
from hf_linattn.patching.module import CallContext
from hf_linattn.patching.plan import sites_of, transformers_model
from hf_linattn.training.objectives import CACHELESS


@torch.no_grad()
def calibrate(model: Any, input_ids: Tensor, keywords: dict[str, bool] = CACHELESS) -> dict[str, float]:
    """Set the first weights of every patch that can be calibrated.

    Args:
        model: patched, causal.
        input_ids: rows of text without padding, `[B, N]`.
        keywords: of the model's forward.

    Returns:
        Name of the attention module -> the squared error of its output over the output's variance that is
        left; empty where no patch can be calibrated.
    """
    errors: dict[str, float] = {}
    with ExitStack() as stack:
        for site in sites_of(transformers_model(model)):
            child: Any = site.module._modules.get(NAME)
            if child is None or not any(can_calibrate(type(part)) for part in child.modules()):
                continue
            hook = _CalibrateHook(site.name, errors)
            handle = site.module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(bypassed(model))
        model.base_model(input_ids=input_ids, **keywords)
    return errors


def can_calibrate(patch: type[Any]) -> bool:
    """Tell whether a patch computes weights of its own from another attention's outputs."""
    own = issubclass(patch, StatefulAttention) and patch.calibrate is not StatefulAttention.calibrate
    return own and not patch.wraps  # which calibrates what it holds


class _CalibrateHook(PatchHook):
    """Forward hook of an attention module: gives its patch what the module's own attention read and gave."""

    def __init__(self, name: str, errors: dict[str, float]) -> None:
        super().__init__()
        self.name, self.errors = name, errors

    def run(
        self, module: Any, child: Any, own: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        with computing_by(child, partial(self._calibrate, module, child, own)):
            module(*args, **kwargs)

    def _calibrate(
        self,
        module: Any,
        child: Any,
        own: str,
        context: CallContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        dropout: float,
        causal: bool,
        extras: dict[str, Any],
    ) -> tuple[Tensor, None]:
        target = native_attention(module, query, key, value, mask, own, scaling=scaling, **extras)[0]
        tokens = Tokens(
            query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, keep=False
        )
        self.errors[self.name] = child.attention.calibrate(tokens, target.transpose(1, 2))
        return target, None
