"""How the layers of a model compute while it trains: once more in the backward, or compiled."""

from __future__ import annotations

import ctypes
import shutil
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_linattn.errors import OptionError
from hf_linattn.patching.contexts import as_in_first_run
from hf_linattn.patching.plan import transformers_model

M_MMAP_THRESHOLD = -3  # malloc.h


def recompute_layers(model: nn.Module, *, switches: bool = True) -> None:
    """Let a model keep the inputs of its layers alone, and compute each layer again in the backward.

    Gradients stay the same. Their second run uses what was in force in the first: dropout, autocast, and
    with `switches` the branches of hybrids.

    Args:
        model: patched or not, or its wrapper.
        switches: whether branches or bypasses may be others in the backward; compiled layers cannot be told.

    Raises:
        OptionError: the model's code cannot.
    """
    inside: Any = transformers_model(model)
    context: dict[str, Any] = {"context_fn": as_in_first_run(inside)} if switches else {}
    function = partial(checkpoint, use_reentrant=False, **context)
    try:
        if not inside.supports_gradient_checkpointing:
            raise ValueError
        inside._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    except ValueError:
        raise OptionError(
            f"--gradient-checkpointing: {type(inside).__name__} does not support it; leave it out, and use a "
            "smaller --batch-size with a larger --grad-accum"
        ) from None
    if inside.device.type == "cpu":
        _give_back_freed_tensors()


def _give_back_freed_tensors() -> None:
    """Let glibc give every freed tensor of a megabyte and more back to the system, in this process.

    It keeps those of up to 32 MB on one heap, where the inputs of layers, which stay, lie between what layers
    free: with 30 layers the process then takes several times what its tensors do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**20)


def compile_layers(model: nn.Module) -> None:
    """Let torch.compile compile each layer of a model at its first call; what is alike is compiled once.

    Names and weights of the model stay as they are.

    Raises:
        OptionError: the model has no such layers, or there is no compiler.
    """
    inside = transformers_model(model)
    layers = [module for module in inside.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise OptionError(
            f"--compile: {type(inside).__name__} has no layers that could be compiled one by one"
        )
    if inside.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise OptionError("--compile needs a C++ compiler on the CPU, and none is on the PATH: install g++")
    # layers of `h2o` differ in size, and torch compiles at most eight of a kind: sizes become variables
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in layers:
        layer.compile()
