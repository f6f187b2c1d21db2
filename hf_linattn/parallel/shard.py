"""This process's part of rows that several processes hold, and what it exchanges with the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_linattn.errors import LinattnError, OptionError, ProcessLostError
from hf_linattn.ops.second_order import only_once

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others. They do the same work, so none should be much slower."""


SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out waiting")
"""Of a partner that is gone, in what torch.distributed raises as a plain RuntimeError."""


@dataclass
class Shard:
    """The `rank`-th of `size` equal parts of every row, in the order of its tokens.

    Attributes:
        rank: of this process among those that share its rows.
        size: their number.
        group: of torch.distributed; a group of its own, so that nothing comes between its messages.
        sent: bytes that this process has sent so far.
    """

    rank: int
    size: int
    group: Any = field(repr=False)
    sent: int = 0

    @classmethod
    def of(cls, size: int | None = None, timeout: timedelta = TIMEOUT) -> Shard:
        """Split rows over `size` neighbouring processes of the default group; all processes must call it.

        Args:
            size: divides the number of processes; None for all of them.
            timeout: how long one waits for the others.

        Raises:
            OptionError: there is no group, or it cannot be cut into so many.
        """
        if not dist.is_initialized():
            raise OptionError(
                "rows are split over a process group, and there is none: start several processes with "
                "torchrun, and call torch.distributed.init_process_group first"
            )
        rank, world = dist.get_rank(), dist.get_world_size()
        size, mine = size or world, None
        if world % size:
            raise OptionError(f"{world} processes cannot be cut into groups of {size}")
        for start in range(0, world, size):
            with lost_processes(rank, world):
                group = dist.new_group(list(range(start, start + size)), timeout=timeout)
            if start <= rank < start + size:
                mine = group
        return cls(rank % size, size, mine)

    def __deepcopy__(self, memo: Any) -> Shard:
        """Share it: a group cannot be copied."""
        return self

    def gather(self, x: Tensor) -> list[Tensor]:
        """Collect a tensor of one shape from all processes, in their order; without gradients."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(parts, x, group=self.group)
        self.sent += x.nbytes * (self.size - 1)
        return parts

    def total(self, count: int) -> int:
        """Sum a number over all processes; not counted as sent."""
        box = torch.tensor([count], device=self.device)
        with self._waiting():
            dist.all_reduce(box, group=self.group)
        return int(box)

    @property
    def device(self) -> torch.device:
        """Device whose tensors the group exchanges."""
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    def first(self, x: Tensor) -> Tensor:
        """Give every process what the first one holds, in the shape of x; with gradients."""
        return _First.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def tail(self, x: Tensor, count: int) -> Tensor:
        """Collect the last tokens of all parts before this one; with gradients.

        Args:
            x: the last tokens of this part `[B, H, N, D]`; all of them where it has fewer than `count`.
            count: how many tokens.

        Returns:
            `[B, H, count, D]`, zeros where the row has not begun yet.
        """
        return _Tail.apply(x, count, self)  # type: ignore[no-any-return, no-untyped-call]

    def earlier(self, x: Tensor) -> Tensor:
        """Put the tokens of all parts before this one in front of its own; with gradients.

        Args:
            x: all tokens of this part, `[B, H, N, D]`.

        Returns:
            `[B, H, (rank + 1) N, D]`.
        """
        return _Earlier.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def swap(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Send tensors, and fill others with what comes; each with the rank of its partner."""
        operations = [
            dist.P2POp(function, x, dist.get_global_rank(self.group, rank), self.group)
            for function, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for x, rank in pairs
        ]
        if operations:
            with self._waiting():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        self.sent += sum(x.nbytes for x, _ in sends)

    def summed(self, x: Tensor) -> Tensor:
        """Hand on what all processes hold alike; its gradient is the sum of theirs."""
        return _Summed.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def spread(self, x: Tensor) -> None:
        """Fill a tensor with what the first process holds."""
        with self._waiting():
            dist.broadcast(x, dist.get_global_rank(self.group, 0), group=self.group)
        self.sent += x.nbytes * (self.size - 1) * (self.rank == 0)

    def add_up(self, x: Tensor) -> None:
        """Sum a tensor over all processes, in place; the first one has the sum."""
        with self._waiting():
            dist.reduce(x, dist.get_global_rank(self.group, 0), group=self.group)
        self.sent += x.nbytes * (self.rank > 0)

    def _waiting(self) -> Any:
        return lost_processes(self.rank, self.size)


@contextmanager
def lost_processes(rank: int, size: int) -> Iterator[None]:
    """Say in one line that another process does not answer; other errors stay what they are.

    Args:
        rank: of this process.
        size: number of processes.

    Raises:
        ProcessLostError: it ended, or is not heard of for the time that the group waits.
    """
    try:
        yield
    except RuntimeError as error:
        if size == 1 or isinstance(error, LinattnError) or not is_loss(error):
            raise
        raise ProcessLostError(
            f"process {rank} of {size} waited for the others in vain: one of them ended, or did not answer "
            f"in time ({' '.join(str(error).split())[:160]}). Look for its own message, and start all again: "
            "what was saved before is kept"
        ) from error


def is_loss(error: BaseException) -> bool:
    """Tell whether torch.distributed complains of a partner that is gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in SIGNS)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        given = x.detach().clone(memory_format=torch.contiguous_format)
        shard.spread(given)
        return given

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.shard.add_up(grad)
        return (grad if ctx.shard.rank == 0 else torch.zeros_like(grad)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        with ctx.shard._waiting():
            dist.all_reduce(grad, group=ctx.shard.group)
        return grad, None


class _Earlier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard, x = shard, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(shard.rank)]
        later = range(shard.rank + 1, shard.size)
        shard.swap([(x, rank) for rank in later], [(part, rank) for rank, part in enumerate(parts)])
        return torch.cat([*parts, x], 2)

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        *earlier, total = (part.contiguous() for part in grad.chunk(shard.rank + 1, 2))
        received = [(torch.empty_like(total), rank) for rank in range(shard.rank + 1, shard.size)]
        shard.swap([(part, rank) for rank, part in enumerate(earlier)], received)
        for part, _ in received:
            total = total + part
        return total, None


class _Tail(torch.autograd.Function):
    """Neighbours first: where a part is shorter than what is wanted, also from parts before the last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, shard: Shard) -> Tensor:
        ctx.shard, ctx.length = shard, x.shape[2]
        ctx.hops = list(_hops(x.shape[2], count, shard.size))
        out = x.new_zeros(*x.shape[:2], count, x.shape[3])
        sends = [
            (x[:, :, x.shape[2] - taken :].contiguous(), shard.rank + hop)
            for hop, taken, _ in ctx.hops
            if shard.rank + hop < shard.size
        ]
        places = [(hop, taken, end) for hop, taken, end in ctx.hops if hop <= shard.rank]
        received = [
            (x.new_empty(*x.shape[:2], taken, x.shape[3]), shard.rank - hop) for hop, taken, _ in places
        ]
        shard.swap(sends, received)
        for (_, taken, end), (part, _) in zip(places, received, strict=True):
            out[:, :, end - taken : end] = part
        return out

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shard, shape = ctx.shard, grad.shape
        total = grad.new_zeros(*shape[:2], ctx.length, shape[3])
        sends = [
            (grad[:, :, end - taken : end].contiguous(), shard.rank - hop)
            for hop, taken, end in ctx.hops
            if hop <= shard.rank
        ]
        takers = [(hop, taken) for hop, taken, _ in ctx.hops if shard.rank + hop < shard.size]
        received = [(grad.new_empty(*shape[:2], taken, shape[3]), shard.rank + hop) for hop, taken in takers]
        shard.swap(sends, received)
        for part, _ in received:
            total[:, :, ctx.length - part.shape[2] :] += part
        return total, None, None


def _hops(length: int, count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """List how far back to look, how many tokens to take there, and where these end in the result."""
    hop, left = 1, count
    while left > 0 and hop < size and length:
        taken = min(length, left)
        yield hop, taken, left
        left -= taken
        hop += 1
