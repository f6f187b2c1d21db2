"""Optimisers of the training loop: AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from hf_linattn.patching.interface import PATCH_PART

OptimizerName = Literal["adamw", "muon"]

Group = dict[str, Any]


class MuonAdamW(Optimizer):
    """torch's Muon for some groups of parameters and AdamW for the others, as one optimiser.

    Groups are marked by `"muon": True` or `False`. An update of Muon (K. Jordan et al., 2024) is the momentum
    of a matrix, made orthogonal; here scaled by 0.2 * sqrt(max(rows, columns)) to the size of AdamW's updates
    ("Muon is Scalable for LLM Training", arXiv:2502.16982, equation 4), so that both take the same rate.
    """

    def __init__(self, groups: list[Group], lr: float, weight_decay: float, adam_beta2: float) -> None:
        """Groups as of any optimiser, each with "muon"; learning rate and weight decay of both."""
        self.parts: dict[bool, Optimizer] = {}
        for muon in {bool(group["muon"]) for group in groups}:
            members = [group for group in groups if group["muon"] == muon]
            self.parts[muon] = (
                Muon(members, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
                if muon
                else _adamw(members, lr, weight_decay, adam_beta2)
            )
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon, part in self.parts.items():
            # read anew: whoever loads or shards replaces both
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] == muon]
            part.step()
        return loss


def build_optimizer(
    name: OptimizerName,
    model: nn.Module,
    rate: Callable[[str], float],
    lr: float,
    weight_decay: float,
    adam_beta2: float,
) -> Optimizer:
    """Build the optimiser of the parameters that require gradients.

    Args:
        name: "muon" takes Muon for the weights of the model's linear layers (LoRA's too), but not for those
            of embeddings and of the output, whose rows are tokens; every other parameter, and all of a
            patch, goes to AdamW.
        model: before it is distributed.
        rate: factor of the learning rate by the name of the parameter; it becomes "factor" of its group.
        lr: peak learning rate.
        weight_decay: decoupled.
        adam_beta2: decay of AdamW's mean of squared gradients.
    """
    matrices = _matrices(model) if name == "muon" else set()
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = (rate(parameter_name), id(parameter) in matrices and PATCH_PART not in parameter_name)
            groups.setdefault(kind, []).append(parameter)
    built: list[Group] = [
        {"params": members, "factor": factor, "muon": muon} for (factor, muon), members in groups.items()
    ]
    make = MuonAdamW if name == "muon" else _adamw
    return make(built, lr, weight_decay, adam_beta2)


def state_bytes(name: OptimizerName, model: nn.Module) -> int:
    """Count the bytes of an optimiser's means: one of a matrix under Muon, else two of each parameter."""
    single = _matrices(model) if name == "muon" else set()
    return sum(
        parameter.nbytes * (1 if id(parameter) in single and PATCH_PART not in parameter_name else 2)
        for parameter_name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _adamw(groups: list[Group], lr: float, weight_decay: float, beta2: float) -> Optimizer:
    return AdamW(groups, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay)


def _matrices(model: nn.Module) -> set[int]:
    """The ids of the weights of linear layers inside."""
    ends: set[int] = set()
    matrices: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding):
            ends.add(id(weight))
        elif isinstance(weight, nn.Parameter) and weight.ndim == 2:
            matrices.add(id(weight))
        output = getattr(module, "get_output_embeddings", lambda: None)()
        ends.add(id(getattr(output, "weight", None)))
    return matrices - ends
