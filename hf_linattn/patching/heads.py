"""Heads that several processes share: the tensor parallelism of transformers.

`from_pretrained(..., tp_plan="auto")` gives each process some heads of a module. It keeps the whole weights
of the patch all the same, which are few: folders are written and read as ever. A call sees the slices of its
own heads. Gradients are summed over the processes, each of which has those of its heads alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_linattn.attention import Patch
from hf_linattn.attention.site import AttentionSite
from hf_linattn.errors import UnsupportedCallError, UnsupportedModelError
from hf_linattn.parallel.shard import Shard

SHARED = ("colwise", "packed_colwise")
"""Styles of a plan by which a projection gives each process some heads; others gather them again."""
PLAIN = (int, float, str, tuple, list, type(None))
ADVICE = "Load the model without tp_plan, or leave it out of the plan"


class HeadShare:
    """What a process needs of a module's patch for the heads that are its own.

    Attributes:
        shard: the processes that share the heads.
        sizes: number of query heads and of key heads that are here; None where it is unknown.
        places: where a tensor is kept, its name there, and its rows for these heads; None for all of it.
    """

    def __init__(self, shard: Shard, child: Any, local: Any, whole: AttentionSite) -> None:
        self.shard, self.where = shard, child.where
        self.sizes = [None if n is None else n // shard.size for n in (whole.heads, whole.kv_heads)]
        self.places: list[tuple[dict[str, Any], str, slice | None]] = []
        for (name, module), here in zip(child.named_modules(), local.modules(), strict=True):
            _refuse_numbered(child.where, module, here)
            for store in ("_parameters", "_buffers"):
                for key, tensor in vars(module)[store].items():
                    if tensor is None:
                        continue
                    own = vars(here)[store][key].shape
                    cut = None if own == tensor.shape else self._rows(own[:1].numel())
                    known = tensor.shape[:1].numel() in (whole.heads, whole.kv_heads)
                    if cut is not None and not (known and own == tensor[cut].shape):
                        raise UnsupportedModelError(
                            f"{child.where}: the heads are shared by {shard.size} processes, and which part "
                            f"of {name}.{key} {list(tensor.shape)} belongs to a head cannot be told: heads "
                            f"must be its first dimension. {ADVICE}"
                        )
                    self.places.append((vars(module)[store], key, cut))

    def _rows(self, count: int) -> slice:
        return slice(self.shard.rank * count, (self.shard.rank + 1) * count)

    def install(self, child: Any) -> None:
        """Let a patch compute with this share."""
        child.head_share = self
        query_heads, key_heads = (slice(None) if n is None else self._rows(n) for n in self.sizes)
        for part in child.modules():
            if isinstance(part, Patch):
                part.query_heads, part.key_heads = query_heads, key_heads

    def shared(self, x: Tensor) -> Tensor:
        """Hand on what is the same in all processes, whose gradient is the sum of theirs."""
        return self.shard.summed(x) if x.requires_grad and torch.is_grad_enabled() else x

    @contextmanager
    def in_place(self, query: Tensor, key: Tensor) -> Iterator[None]:
        """Put the weights of these heads where a patch reads its weights, for one call.

        Raises:
            UnsupportedCallError: the call has other heads than the plan says.
        """
        found = query.shape[1], key.shape[1]
        if any(own not in (None, n) for own, n in zip(self.sizes, found, strict=True)):
            raise UnsupportedCallError(
                f"{self.where}: {self.shard.size} processes share its heads, so that {self.sizes[0]} and "
                f"{self.sizes[1]} for keys should be here, and there are {found[0]} and {found[1]}. {ADVICE}"
            )
        held = []
        try:
            for store, name, cut in self.places:
                whole: Tensor = store[name]
                shared = self.shared(whole)
                if cut is None and shared is whole:  # a patch may note something in it
                    continue
                held.append((store, name, whole))
                store[name] = shared if cut is None else shared[cut]
            yield
        finally:
            for store, name, whole in held:
                store[name] = whole


def _refuse_numbered(where: str, whole: nn.Module, local: nn.Module) -> None:
    """Refuse a part that notes the number of its heads: it may compute by it, or by the numbers of heads.

    Raises:
        UnsupportedModelError: it does, and does not say that it takes `query_heads` and `key_heads` of them.
    """
    if not isinstance(whole, Patch):
        return
    if whole.joins_heads:
        raise UnsupportedModelError(f"{where}: {whole.name!r} {whole.joins_heads}. {ADVICE}")
    noted = [
        name
        for name, value in vars(whole).items()
        if isinstance(value, PLAIN) and value != vars(local).get(name, value)
    ]
    if noted and not whole.takes_own_heads:
        raise UnsupportedModelError(
            f"{where}: heads are shared by several processes, and {whole.name!r} goes by their number "
            f"({noted[0]}): its class does not say that it takes_own_heads. {ADVICE}"
        )


def processes_of(model: Any) -> Shard | None:
    """Find the processes that a model's weights are shared by; None where this one has them all.

    Raises:
        UnsupportedModelError: it is split in other ways besides.
    """
    if (getattr(model, "_tp_size", None) or 1) == 1 or model._device_mesh is None:
        return None
    mesh = model._device_mesh
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    if mesh.size() != dist.get_world_size():
        raise UnsupportedModelError(
            f"{type(model).__name__} is split over {dist.get_world_size()} processes, and {mesh.size()} of "
            "them share its heads: tensor parallelism beside another kind (fsdp, pp) is not supported. Give"
            " tp_size the number of processes"
        )
    return Shard(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def shares_of(
    model: Any,
    sites: list[AttentionSite],
    children: dict[str, Any],
    rebuilt: Callable[[AttentionSite], Any],
) -> dict[str, HeadShare]:
    """Say which heads of each patched module are here, nothing installed yet.

    Args:
        model: of transformers.
        sites: its attention modules.
        children: dotted module name -> its `PatchedAttention`.
        rebuilt: makes the one of a site again, for a site with fewer heads.

    Returns:
        Dotted module name -> share, of modules whose heads several processes share.

    Raises:
        UnsupportedModelError: a patch that cannot be shared out by heads.
    """
    shard = processes_of(model)
    shares: dict[str, HeadShare] = {}
    if shard is None:
        return shares
    for site in sites:
        if site.name not in children or not _is_shared(model, site):
            continue
        child, sizes = children[site.name], (site.heads, site.kv_heads)
        for count in sizes:
            if count is not None and count % shard.size:
                raise UnsupportedModelError(
                    f"{child.where}: {shard.size} processes cannot share {count} heads. Take a number that "
                    "divides them"
                )
        heads, kv_heads = (None if n is None else n // shard.size for n in sizes)
        local = rebuilt(replace(site, heads=heads, kv_heads=kv_heads)).train(child.training)
        shares[site.name] = HeadShare(shard, child, local, site)
    return shares


def _is_shared(model: Any, site: AttentionSite) -> bool:
    """Tell whether the plan gives each process some heads of a module."""
    plan = model.tp_plan or {}
    names = (f"{site.name}.{name}" for name, _ in site.module.named_modules() if name)
    return any(plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)) in SHARED for name in names)


@torch.no_grad()
def agree(model: Any, children: dict[str, Any]) -> None:
    """Give all processes the weights of the first one: what a patch draws may go by a process's own seed."""
    shard = processes_of(model)
    if shard is None:
        return
    for child in children.values():
        for tensor in child.state_dict().values():
            shard.spread(tensor)
