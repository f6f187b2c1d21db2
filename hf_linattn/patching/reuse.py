"""Measure many arrangements of layers on the same texts: layers in front of the first patch run once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_linattn.patching.interface import NAME
from hf_linattn.patching.plan import sites_of, transformers_model

MEMORY = 2**32
"""Bytes of outputs that are kept, in the memory of the CPU; behind them layers run again."""

SHOWN = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments, or entries of the config, by which a model gives what is inside its layers."""


@contextmanager
def reusing_layers(model: nn.Module, memory: int = MEMORY) -> Iterator[None]:
    """Keep what a model's own layers give for an input, and do not run them again for it, while this lasts.

    A layer counts as the model's own where all attention in it and in front of it is unpatched or bypassed,
    which may change from pass to pass. Results are those of running all layers, bit for bit: the first
    pass that is the model's own throughout is tried against its own last layer alone, and where that gives
    something else, or layers are not run in order, nothing is reused. Passes with gradients or a cache, those
    that give what is inside layers, and models in training run as always. Weights must not change inside.

    Args:
        model: a causal model, or its wrapper.
        memory: bytes of outputs to keep, at most.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import bypassed, patch_model
        >>> from hf_linattn.patching.reuse import reusing_layers
        >>> model = patch_model(AutoModelForCausalLM.from_pretrained("examples/base"), "elu1")
        >>> ids = torch.arange(20)[None]
        >>> with reusing_layers(model), torch.no_grad():
        ...     with bypassed(model):
        ...         own = model(ids, use_cache=False).logits
        ...     with bypassed(model, ["model.layers.[0-4].*"]):  # five layers of six are not run again
        ...         one = model(ids, use_cache=False).logits
    """
    inside: Any = transformers_model(model)
    stack, attentions = _stack_of(inside)
    if len(attentions) < 2:
        yield
        return
    holder, layers = inside.get_submodule(stack.rpartition(".")[0]), [*inside.get_submodule(stack)]
    reuse = _Reuse(holder, layers, attentions, memory)
    modules = [holder, *layers]
    before = [module.__dict__.get("forward") for module in modules]
    try:
        reuse.install()
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


def _stack_of(model: nn.Module) -> tuple[str, list[list[nn.Module]]]:
    """Name the list of the layers that the text goes through, and the attentions of each; none if unknown."""
    modules = dict(model.named_modules())
    attention: dict[str, list[nn.Module]] = {}
    for site in sites_of(model):
        if site.tower:
            continue
        parts = site.name.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        holders = [name for name in above if isinstance(modules[name], GradientCheckpointingLayer)]
        if not holders:
            return "", []
        attention.setdefault(holders[0], []).append(site.module)
    stacks = {name.rpartition(".")[0] for name in attention}
    stack = stacks.pop() if len(stacks) == 1 else ""
    if not isinstance(modules[stack], nn.ModuleList):
        return "", []
    return stack, [attention.get(f"{stack}.{name}", []) for name, _ in modules[stack].named_children()]


@dataclass
class _Record:
    """An input of the model, flattened, and the outputs of its first layers, as many as are known."""

    given: list[Any]
    structure: TreeSpec
    outputs: list[Tensor] = field(default_factory=list)

    def is_of(self, given: Sequence[Any], structure: TreeSpec) -> bool:
        """Tell whether this is the input."""
        return structure == self.structure and all(map(_same, given, self.given))


@dataclass
class _Pass:
    """One forward pass.

    Attributes:
        record: of its input.
        known: layers that are left out; own: layers whose outputs may be kept; next: the layer to come.
    """

    record: _Record
    known: int
    own: int
    next: int = 0


class _Reuse:
    """The forwards of layers and of what runs them, while outputs of layers are kept.

    Args:
        holder: the module that runs the layers.
        layers: in their order.
        attentions: of each layer.
        memory: bytes.
    """

    def __init__(
        self,
        holder: nn.Module,
        layers: Sequence[nn.Module],
        attentions: Sequence[Sequence[nn.Module]],
        memory: int,
    ) -> None:
        """Begin with nothing kept."""
        self.holder, self.layers, self.attentions, self.left = holder, layers, attentions, memory
        self.records: list[_Record] = []
        self.running: _Pass | None = None
        self.usable: bool | None = None  # None: not tried yet

    def install(self) -> None:
        """Put the forwards in place of the modules' own."""
        self.holder.forward = self._forward_of_holder(self.holder.forward)
        for index, layer in enumerate(self.layers):
            layer.forward = self._forward_of_layer(index, layer.forward)

    def _forward_of_holder(self, forward: Any) -> Any:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.usable is False or self.running is not None or not self._plain(args, kwargs):
                return forward(*args, **kwargs)
            own, record = self._own_layers(), self._record_of(args, kwargs)
            known = min(own, len(record.outputs)) if self.usable else 0
            outputs = self._pass(forward, args, kwargs, _Pass(record, known, own))
            complete = len(record.outputs) == len(self.layers) == own
            if self.usable is None and complete:
                self.usable = self._same_by_last_layer(forward, args, kwargs, record, outputs)
            return outputs

        return run

    def _pass(self, forward: Any, args: Any, kwargs: Any, running: _Pass) -> Any:
        self.running = running
        try:
            return forward(*args, **kwargs)
        finally:
            self.running = None

    def _same_by_last_layer(
        self, forward: Any, args: Any, kwargs: Any, record: _Record, outputs: Any
    ) -> bool:
        """Try whether the last layer needs nothing of those in front but the output of the one before it."""
        known = len(self.layers) - 1
        try:
            again = self._pass(forward, args, kwargs, _Pass(record, known, known))
        except Exception:  # a layer that looks for what one in front should have left: nothing can be reused
            return False
        return all(map(_same, tree_leaves(again), tree_leaves(outputs)))

    def _forward_of_layer(self, index: int, forward: Any) -> Any:
        @wraps(forward)
        def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            running = self.running
            if running is None:
                return forward(hidden_states, *args, **kwargs)
            if running.next != index:
                self.usable = False
            running.next = index + 1
            if index < running.known - 1:
                return hidden_states
            if index == running.known - 1:
                return running.record.outputs[index].to(hidden_states.device, copy=True)
            output = forward(hidden_states, *args, **kwargs)
            if index < running.own:
                self._keep(running.record, index, hidden_states, output)
            return output

        return run

    def _keep(self, record: _Record, index: int, hidden_states: Tensor, output: Any) -> None:
        if not isinstance(output, Tensor) or output.shape != hidden_states.shape:
            self.usable = False
        elif index == len(record.outputs) and output.nbytes <= self.left:
            self.left -= output.nbytes
            record.outputs.append(output.to("cpu", copy=True))

    def _plain(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a pass depends on nothing but its arguments, and leaves nothing but its outputs."""
        given = tree_leaves((args, kwargs))
        if not all(x is None or isinstance(x, Tensor | bool | int | str) for x in given):
            return False
        config = getattr(self.holder, "config", None)
        shown = any(kwargs.get(name) or getattr(config, name, False) for name in SHOWN)
        learns = torch.is_grad_enabled() or self.holder.training
        return kwargs.get("use_cache") is False and not shown and not learns

    def _own_layers(self) -> int:
        """Count the layers in front of the first one that is patched and not bypassed."""
        for index, attentions in enumerate(self.attentions):
            children: list[Any] = [module._modules.get(NAME) for module in attentions]
            if any(child is not None and child.bypass is None for child in children):
                return index
        return len(self.layers)

    def _record_of(self, args: Any, kwargs: Mapping[str, Any]) -> _Record:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
        given, structure = tree_flatten((args, dict(kwargs), autocast))
        for record in self.records:
            if record.is_of(given, structure):
                return record
        copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
        self.records.append(_Record(copies, structure))
        return self.records[-1]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
