"""Adapters: attention modules with attention code of their own call the interface while they are patched.

One file per family. Each holds a forward that does what the module's own does (projections, rotary embedding,
head layout, cache), and calls `attention_interface` where that one computes softmax.
"""

from importlib import import_module
from pkgutil import iter_modules

from hf_linattn.patching.adapters.base import adapt, adapter_of, attributes_of, masks_of
from hf_linattn.patching.adapters.refused import REASONS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["REASONS", "adapt", "adapter_of", "attributes_of", "masks_of"]
