"""Who else reads a call: `torch.export`, whose programs run without this package, and `torch.func`."""

from __future__ import annotations

import torch


def exporting() -> bool:
    """Tell whether `torch.export` traces this; False under `torch.compile`.

    `torch.compiler.is_exporting` is True under `torch.compile` too where torch is older than 2.12.
    """
    return bool(torch.compiler._is_exporting_flag)


def transforming() -> bool:
    """Tell whether `torch.func` transforms this: grad, vmap, jvp and what is made of them."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def by_torch_alone() -> bool:
    """Tell whether nothing but torch's own operations will do."""
    return exporting() or transforming()
