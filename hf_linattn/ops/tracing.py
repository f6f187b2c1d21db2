"""Who traces a call: `torch.export`, whose programs run without this package."""

from __future__ import annotations

import torch


def exporting() -> bool:
    """Tell whether `torch.export` traces this; False under `torch.compile`.

    `torch.compiler.is_exporting` is True under `torch.compile` too where torch is older than 2.12.
    """
    return bool(torch.compiler._is_exporting_flag)
