"""What tokens that are decoded one by one, by a call that is prepared once, must find as it was."""

from __future__ import annotations

from torch import Tensor, nn


class Weights:
    """The weights of a module and of all in it, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self.found = [
            (part._parameters, name, weight, weight.data_ptr(), weight._version)
            for part in module.modules()
            for name, weight in part._parameters.items()
            if weight is not None
        ]

    def changed(self) -> bool:
        """Tell whether one was replaced, moved or written to."""
        return any(
            parameters.get(name) is not weight or weight.data_ptr() != at or weight._version != version
            for parameters, name, weight, at, version in self.found
        )


def dense(*tensors: Tensor) -> bool:
    """Tell whether the last axes are dense, as kernels read them."""
    return all(x.stride(-1) == 1 for x in tensors)
