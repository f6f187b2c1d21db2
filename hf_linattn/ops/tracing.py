"""Who else reads a call: `torch.export`, whose programs run without this package, and `torch.func`."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def exporting() -> bool:
    """Tell whether `torch.export` traces this; False under `torch.compile`.

    `torch.compiler.is_exporting` is True under `torch.compile` too where torch is older than 2.12.
    """
    return bool(torch.compiler._is_exporting_flag)


def transforming() -> bool:
    """Tell whether `torch.func` transforms this, or derivatives go forward with the numbers, as in jvp."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def by_torch_alone() -> bool:
    """Tell whether nothing but torch's own operations will do."""
    return exporting() or transforming()
