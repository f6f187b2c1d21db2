"""What memory and time a run will take, measured on a row or two before its first step."""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_linattn.errors import TrainingError
from hf_linattn.patching.loading import explain_missing
from hf_linattn.training.fsdp import is_sharding
from hf_linattn.training.loop import LoopSettings, LossFunction, Preparation, to_device
from hf_linattn.training.optimizers import state_bytes

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEASURED = 2
"""Rows of the text that are read, whatever the batch."""


@dataclass(frozen=True)
class Estimate:
    """What a step of one process needs beside the weights, in bytes, and the seconds that it takes."""

    gradients: int
    optimizer: int
    activations: int
    seconds: float

    @property
    def needed(self) -> int:
        """All of its memory."""
        return self.gradients + self.optimizer + self.activations

    def describe(self, rows: int, length: int) -> str:
        """Say what the memory is for."""
        return (
            f"{_size(self.needed)} beside the weights (gradients {_size(self.gradients)}, optimizer "
            f"{_size(self.optimizer)}, {rows} x {length} tokens {_size(self.activations)})"
        )


def announce(
    accelerator: Accelerator,
    model: nn.Module,
    blocks: NDArray[np.int32],
    settings: LoopSettings,
    losses: LossFunction,
    prepare: Preparation | None,
    done: int = 0,
) -> Estimate | None:
    """Measure what a run will take, and say so in a line on stderr.

    Args:
        accelerator: of this process.
        model: before it is distributed; goes to the device, and is left as it was.
        blocks: rows of the text, `[blocks, N]`.
        settings: of the loop.
        losses: of the rows of a batch.
        prepare: makes the batch of rows; None takes them as they are.
        done: steps of the run that are done.

    Returns:
        The estimate; None where parameters are sharded, which is not measured.

    Raises:
        TrainingError: the memory does not suffice.
    """
    if is_sharding(accelerator):
        return None
    size = sum(parameter.nbytes for parameter in model.parameters())
    moving = next(model.parameters()).device.type != accelerator.device.type
    if moving and size > (free := free_bytes(accelerator.device)):
        raise TrainingError(
            f"the weights need {_size(size)}, and {_size(free)} are free on {accelerator.device}"
        )
    model.to(accelerator.device)
    free, rows = free_bytes(accelerator.device), settings.batch_size
    run = partial(_pass_seconds, accelerator, model, blocks, losses, prepare)
    copied = accelerator.num_processes > 1
    estimate = _measure(model, settings, run, free, copied=copied)
    what = estimate.describe(rows, blocks.shape[1])
    # one for all: a process that refuses alone leaves the others waiting
    if any(gather_object([estimate.needed > free])):
        raise _refusal(f"a step needs about {what}", free)
    if accelerator.device.type != "cpu":
        estimate = replace(estimate, seconds=_step_seconds(model, settings, run))
    steps = settings.max_steps - done
    seconds = steps * estimate.seconds
    if accelerator.is_main_process:
        sys.stderr.write(
            f"memory: about {what}; {_size(free)} are free. "
            f"Time: about {_duration(seconds)} for {steps:,} steps, without validation\n"
        )
    return estimate


def _measure(
    model: nn.Module, settings: LoopSettings, run: Callable[[int], float], free: int, *, copied: bool
) -> Estimate:
    """Run one row and two, forward and backward: what grows with the rows, and what does not.

    Args:
        model: that `run` runs.
        settings: of the loop.
        run: takes the number of rows, and gives seconds.
        free: bytes.
        copied: gradients are, to be sent to other processes.
    """
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    optimizer = state_bytes(settings.optimizer, model)
    copies = gradients if copied else 0
    peaks: list[int] = []
    with _left_as_it_was(model):
        for rows in range(1, min(settings.batch_size, MEASURED) + 1):
            with LiveBytes(free - optimizer - copies) as live:
                seconds = run(rows) / rows
            peaks.append(live.peak)
            model.zero_grad(set_to_none=True)
    of_row = max(0, peaks[-1] - peaks[0])
    activations = max(0, peaks[0] + of_row * (settings.batch_size - 1) - gradients) + copies
    return Estimate(gradients, optimizer, activations, seconds * settings.batch_size * settings.grad_accum)


def _pass_seconds(
    accelerator: Accelerator,
    model: nn.Module,
    blocks: NDArray[np.int32],
    losses: LossFunction,
    prepare: Preparation | None,
    rows: int,
) -> float:
    """Run as many rows forward and backward, of the first MEASURED; return the seconds that took."""
    row_ids = np.arange(rows) % min(len(blocks), MEASURED)
    batch = blocks[row_ids] if prepare is None else prepare(blocks[row_ids], row_ids, 0)
    began = time.perf_counter()
    with accelerator.autocast():
        loss = losses(model, to_device(batch, accelerator)).mean()
    loss.backward()
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)
    return time.perf_counter() - began


def _step_seconds(model: nn.Module, settings: LoopSettings, run: Callable[[int], float]) -> float:
    """Run a batch, once its memory is known to suffice; a GPU takes hardly longer for it than for a row.

    Returns:
        Seconds of the second pass: the first compiles kernels and takes memory from the driver.
    """
    with _left_as_it_was(model):
        for _ in range(2):
            seconds = run(settings.batch_size)
            model.zero_grad(set_to_none=True)
    return seconds * settings.grad_accum


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make while this lasts, and are not freed; on any device.

    Attributes:
        peak: the most of them at a time.

    Raises:
        TrainingError: more than `limit` of them at a time.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.now, self.peak = limit, 0, 0
        self._live: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count what it made anew."""
        out = func(*args, **(kwargs or {}))
        inputs = {key for key, _ in _storages((args, kwargs))}
        for key, storage in _storages(out):
            if key not in inputs and key not in self._live:
                size = storage.nbytes()
                self._live.add(key)
                self.now += size
                weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.now)
        if self.now > self.limit:
            raise _refusal(
                f"one or two rows alone need {_size(self.now)} and more beside the optimizer", self.limit
            )
        return out

    def _freed(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


def _storages(tree: Any) -> Iterator[tuple[int, Any]]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """In training, without a trace: random numbers, buffers, mode and gradients come back."""
    training = model.training
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    model.train()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer.copy_(value)


def free_bytes(device: torch.device) -> int:
    """Tell how much memory a process may still take on its device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = int(psutil.virtual_memory().available)
    try:  # of a container
        limit = int(CGROUP_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        pass
    else:
        free = min(free, limit - psutil.Process().memory_info().rss)
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_weights_fit(name: str, dtype: torch.dtype) -> None:
    """Refuse the weights of a folder that are more than the free memory, before they are loaded.

    Args:
        name: of the folder; what is no folder, a name on the Hub, is not looked at.
        dtype: that they are loaded in.

    Raises:
        TrainingError: naming both; or the weights are damaged.
    """
    numbers = 0
    for path in Path(name).glob("*.safetensors"):
        with explain_missing(f"cannot read {path}", TrainingError), safe_open(path, framework="pt") as file:
            numbers += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    size, free = numbers * dtype.itemsize, free_bytes(torch.device("cpu"))
    if size > free:
        kind = str(dtype).removeprefix("torch.")
        raise TrainingError(
            f"out of memory: the weights of {name} need {_size(size)} in {kind}, and {_size(free)} are free. "
            "Give --dtype bfloat16, or take a smaller model"
        )


def _refusal(what: str, free: int) -> TrainingError:
    return TrainingError(
        f"out of memory before the first step: {what}, and {_size(free)} are free. Give "
        "--gradient-checkpointing, a smaller --batch-size with a larger --grad-accum, --mixed-precision bf16 "
        "or --lora"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
