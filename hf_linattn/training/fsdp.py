"""Parameters split over the processes (FSDP version 2, `fully_shard`): set up, sharded, gathered again.

Every parameter is then a DTensor, of which a process holds a part; modules gather theirs around their
forward. Files never see that: what is saved is whole tensors under the names of the plain model.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_linattn.errors import OptionError


def accelerator_options() -> dict[str, Any]:
    """Make the options of `Accelerator` where `accelerate launch --use_fsdp` started this process.

    Raises:
        OptionError: a setting of FSDP that does not work here, or another way to split a model.
    """
    for flag in ("deepspeed", "megatron_lm"):
        if os.environ.get(f"ACCELERATE_USE_{flag.upper()}", "false").lower() == "true":
            raise OptionError(
                f"accelerate launch --use_{flag} is not supported by this command: split the model with "
                "--use_fsdp --fsdp_version 2, or leave it out. Trainer takes patched models under DeepSpeed"
            )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return {}
    from accelerate.utils import FullyShardedDataParallelPlugin

    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise OptionError("FSDP version 1 is not supported: give accelerate launch --fsdp_version 2")
    try:
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy=os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"),
            # it would leave the models that are validated, and the teacher, empty in all processes but one
            cpu_ram_efficient_loading=False,
        )
    except (ImportError, ValueError) as error:
        raise OptionError(f"FSDP: {error}") from error
    if plugin.activation_checkpointing:
        raise OptionError(
            "FSDP with activation checkpointing is not supported: it runs forwards again when what was "
            "switched for them (a window dropped, a patch bypassed) is back. Give the command "
            "--gradient-checkpointing instead."
        )
    return {"fsdp_plugin": plugin}


def set_up(accelerator: Any, options: dict[str, Any]) -> None:
    """Finish the settings of FSDP in an accelerator that was built with `accelerator_options`.

    Raises:
        OptionError: float16.
    """
    from accelerate import DistributedType, ParallelismConfig, PartialState
    from torch.distributed.fsdp import MixedPrecisionPolicy

    state, plugin = accelerator.state, options.get("fsdp_plugin")
    if plugin is not None and state.distributed_type == DistributedType.MULTI_CPU and state.num_processes > 1:
        # accelerate (1.15) knows FSDP on accelerators only. On CPUs, where users try a launch out before they
        # rent GPUs, it would replicate the model and say nothing.
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
        # without a mesh torch takes the kind of accelerator that it was built for
        state.parallelism_config = ParallelismConfig(dp_shard_size=state.num_processes)
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
    if not is_sharding(accelerator):
        return
    if accelerator.mixed_precision == "fp16":
        raise OptionError("--mixed-precision fp16 is not supported under FSDP: use bf16 or no")
    if accelerator.mixed_precision == "bf16":
        # sums over processes stay in float32, as without FSDP
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def is_sharding(accelerator: Any) -> bool:
    """Tell whether models that are prepared get sharded parameters."""
    return bool(accelerator.is_fsdp2)


def shard(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """Split the parameters of a model, in place, and let its optimiser have the parts.

    Each decoder layer becomes a unit that is gathered for its own forward and backward; a model with
    `in_one_piece` becomes a single one.
    """
    with _wrapping(accelerator, model, frozen=False):
        model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.mixed_precision != "no":
        # as for replicated models: buffers are float32, and norms compute in it
        forward = model.forward

        def autocast(*args: Any, **kwargs: Any) -> Any:
            with accelerator.autocast():
                return forward(*args, **kwargs)

        model.forward = autocast
    return model, optimizer


def shard_frozen(accelerator: Any, model: nn.Module) -> nn.Module:
    """Put a model that is never trained on the device, split over the processes where others are."""
    model.eval().requires_grad_(False)
    if not is_sharding(accelerator):
        return model.to(accelerator.device)
    from accelerate.utils import fsdp2_prepare_model

    with _wrapping(accelerator, model, frozen=True):
        return cast("nn.Module", fsdp2_prepare_model(accelerator, model))


@contextmanager
def _wrapping(accelerator: Any, model: nn.Module, *, frozen: bool) -> Iterator[None]:
    """The plugin's settings for one model; accelerate writes into them, and several models follow."""
    plugin = accelerator.state.fsdp_plugin
    names = ("auto_wrap_policy", "transformer_cls_names_to_wrap", "mixed_precision_policy")
    before = {name: getattr(plugin, name) for name in names}
    if getattr(model, "in_one_piece", False):
        plugin.auto_wrap_policy = None
    elif plugin.transformer_cls_names_to_wrap is None:
        present = {type(module).__name__ for module in model.modules()}
        layers = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = sorted(name for name in layers if name in present)
    if frozen:
        plugin.mixed_precision_policy = None
    try:
        with warnings.catch_warnings():
            # accelerate 1.15 asks torch 2.13 for a mesh in an old way
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            yield
    except ValueError as error:  # names of layers that the model does not have
        raise OptionError(f"FSDP: {error}") from error
    finally:
        for name, value in before.items():
            setattr(plugin, name, value)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather all of a tensor: a call of all processes where it is sharded."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast("Tensor", gather())


def distribute_like(tensor: Tensor, target: Tensor) -> Tensor:
    """Take this process's part of a tensor that all have, as `target` is split; on its device."""
    tensor = tensor.to(target.device)
    mesh = getattr(target, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, cast("Any", target).placements, src_data_rank=None)


class MetaCopy:
    """A copy of a model on torch's meta device, to be filled with the weights of its sharded twin.

    Args:
        model: before it is sharded.
        needed: whether this process wants the result.
    """

    def __init__(self, model: nn.Module, needed: bool) -> None:
        empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
        self.model: nn.Module | None = copy.deepcopy(model, cast("Any", empty)) if needed else None

    @torch.no_grad()
    def fill(self, trained: nn.Module) -> nn.Module | None:
        """Return the plain model on the CPU; None where it is not needed. A call of all processes."""
        reshard(trained)
        parameters = dict(trained.named_parameters())
        values: dict[int, nn.Parameter] = {}
        empty_parameters = {} if self.model is None else dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            value = full_tensor(parameter.detach())
            if name in empty_parameters:
                empty = empty_parameters[name]
                cpu = value.to("cpu", empty.dtype)
                values[id(empty)] = nn.Parameter(cpu, empty.requires_grad)
        if self.model is None:
            return None
        assert empty_parameters.keys() == parameters.keys()
        for module in self.model.modules():
            for key, empty_one in module._parameters.items():
                if empty_one is not None:
                    module._parameters[key] = values[id(empty_one)]  # tied ones stay tied
        current = dict(self.model.named_buffers())
        for name, buffer in trained.named_buffers():
            current[name].copy_(buffer)
        return self.model.cpu()


def reshard(model: nn.Module) -> None:
    """Give modules that a validation has left gathered their own parts back."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
