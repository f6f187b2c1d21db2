"""Devices without float64, as Apple's GPUs are, on a machine that has none."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _refuse(result: Any, applies: Any) -> Any:
    for x in tree_leaves(result):
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64 and applies(x):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    return result


class NoFloat64(TorchDispatchMode):
    """Refuse float64 on the meta device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _refuse(function(*args, **(kwargs or {})), lambda x: x.is_meta)


class OnDevice(torch.Tensor):
    """A tensor that is elsewhere until `cpu` is called: `x.as_subclass(OnDevice)`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        return _refuse(result, lambda x: isinstance(x, cls))
