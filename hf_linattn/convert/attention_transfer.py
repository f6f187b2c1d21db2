"""Attention transfer: every patched layer learns to do what the model's own attention does, all in one pass.

The own attention stays in force, so each layer gets the inputs that it always got, and its output flows on;
the patch computes from the same inputs, and its output is compared. No gradient leaves a layer.

("Linearizing with LoLCATs", arXiv:2410.10254, section 3.2; weights: "The Hedgehog & the Porcupine",
arXiv:2402.04347, section 4.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_linattn.attention.base import Attention
from hf_linattn.attention.site import AttentionSite
from hf_linattn.convert.patch_hook import PatchHook, computing_by
from hf_linattn.errors import OptionError
from hf_linattn.patching.contexts import bypassed, hybrids, use_branches
from hf_linattn.patching.interface import NAME, native_attention
from hf_linattn.patching.module import CallContext, PatchedAttention
from hf_linattn.patching.plan import sites_of, transformers_model
from hf_linattn.training.objectives import CACHELESS

Target = Literal["output", "weights"]


class AttentionTransfer(nn.Module):
    """A patched model as a module to train: token ids `[B, N]` -> losses `[B]`, the mean over its layers.

    Hybrids of a window and a linear attention are compared by the linear one alone, over all tokens: trained
    together, the window does all the work.

    Args:
        model: patched; everything but its patch is frozen.
        target: what is compared. "output": the output of the attention module, by the mean squared error over
            the variance of the row, so that no layer dominates. "weights": the attention weights, by their
            Kullback-Leibler divergence in nats, mean over heads and queries; takes memory for B x H x N x N
            numbers per layer.
        projections: train copies of the module's other weights (query, key, value, output) too; `finish`
            puts them into the model.
        keywords: of the model's forward, by default those of a model that predicts the next token.
    """

    in_one_piece = True
    """FSDP must not split it by layers: the losses leave inside of them, out of reach of a layer's hooks."""

    def __init__(
        self,
        model: Any,
        target: Target = "output",
        *,
        projections: bool = False,
        keywords: dict[str, bool] = CACHELESS,
    ) -> None:
        super().__init__()
        self.model, self.target = model, target
        self.keywords = keywords
        self.sites = [site for site in sites_of(transformers_model(model)) if NAME in site.module._modules]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{NAME}." in name)
        own = [
            {name: p for name, p in site.module.named_parameters() if not name.startswith(f"{NAME}.")}
            for site in self.sites
        ]
        self.names = [list(parameters) if projections else [] for parameters in own]
        self.copies = nn.ModuleList(
            nn.ParameterList(parameters[name].detach().clone() for name in names)
            for parameters, names in zip(own, self.names, strict=True)
        )
        self.layer_losses: dict[str, float] = {}
        """Of the last batch, by the name of the attention module."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute the losses of the rows: `[B, N]` -> `[B]`."""
        compared: dict[str, Tensor] = {}
        grad = torch.is_grad_enabled()
        with ExitStack() as stack:
            for site, weights in self._copied():
                hook = _CompareHook(site.name, self.target, weights, grad, compared)
                handle = site.module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(bypassed(self.model))
            if hybrids(self.model):
                stack.enter_context(use_branches(self.model, "linear"))
            self.model.base_model(input_ids=input_ids, **self.keywords)
        self.layer_losses = {name: float(losses.detach().mean()) for name, losses in compared.items()}
        return torch.stack(list(compared.values())).mean(0)

    def freeze_unused(self, input_ids: Tensor) -> int:
        """Freeze what has no part in the loss (the mix of a hybrid); returns how many parameters train.

        Args:
            input_ids: a row or more to find out with, `[B, N]`.
        """
        with torch.enable_grad():
            loss = self(input_ids).mean()
            if loss.requires_grad:
                loss.backward()
        trained = 0
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.grad is not None)
            trained += parameter.numel() if parameter.requires_grad else 0
            parameter.grad = None
        return trained

    @torch.no_grad()
    def finish(self) -> Any:
        """Put the trained copies of the projections into the model, and return it."""
        for site, weights in self._copied():
            for name, trained in weights.items():
                site.module.get_parameter(name).copy_(trained)
        return self.model

    def _copied(self) -> Iterator[tuple[AttentionSite, dict[str, Tensor]]]:
        """Every site with the copies of its projections, by their names in the module."""
        for site, names, copies in zip(self.sites, self.names, self.copies, strict=True):
            yield site, dict(zip(names, copies.parameters(), strict=True))


def check_weights_comparable(model: nn.Module) -> None:
    """Refuse patches whose weights cannot be found by one-hot values.

    Raises:
        OptionError: gates are made of the values.
    """
    for part in model.modules():
        if isinstance(part, Attention) and part.gates_by_value:
            raise OptionError(
                f"--target weights finds weights by one-hot values, and {part.name!r} makes its gates of the "
                'values: give --options \'{"source": "hidden"}\', or leave --target out'
            )


class _CompareHook(PatchHook):
    """Forward hook of an attention module: runs its patch on the same inputs and notes how far off it is."""

    def __init__(
        self, name: str, target: Target, weights: dict[str, Any], grad: bool, compared: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.name, self.target, self.weights, self.grad, self.compared = name, target, weights, grad, compared

    def run(
        self, module: Any, child: Any, own: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        with torch.set_grad_enabled(self.grad), ExitStack() as stack:
            if self.target == "weights":
                stack.enter_context(_comparing_weights(module, child, own, self._note))
            patched_output = functional_call(module, self.weights, args, kwargs)
            if self.target == "output":
                self._note(relative_error(_first(patched_output), _first(output)))

    def _note(self, losses: Tensor) -> None:
        self.compared[self.name] = losses


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Divide the mean squared error of each row by the variance of its target: `[B, ...]` -> `[B]`."""
    output, target = output.float().flatten(1), target.float().flatten(1)
    variance = target.var(1, correction=0).clamp_min(torch.finfo(target.dtype).tiny)
    return (output - target).square().mean(1) / variance


def weights_divergence(weights: Tensor, target: Tensor) -> Tensor:
    """Compute KL(target || weights) in nats, mean over heads and queries: `[B, H, N, S]` -> `[B]`."""
    tiny = torch.finfo(torch.float32).tiny
    weights, target = weights.float().clamp_min(tiny), target.float()
    return (target * (target.clamp_min(tiny).log() - weights.log())).sum(-1).flatten(1).mean(1)


def _comparing_weights(
    module: Any, child: Any, own: str, note: Callable[[Tensor], None]
) -> AbstractContextManager[None]:
    """While this lasts, the child compares weights, by one-hot values, and gives an output of zeros."""

    def forward(
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
        keys = key.shape[2]
        one_hot = torch.eye(keys, dtype=value.dtype, device=value.device)
        one_hot = one_hot.expand(*value.shape[:2], keys, keys)
        with torch.no_grad():
            target = native_attention(module, query, key, one_hot, mask, own, scaling=scaling, **extras)[0]
        weights = PatchedAttention.forward(
            child, context._replace(layer=None), query, key, one_hot, mask, scaling, 0.0, causal, extras
        )[0]
        note(weights_divergence(weights.transpose(1, 2), target.transpose(1, 2)))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    return computing_by(child, forward)


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first
