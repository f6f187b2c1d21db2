"""Change the attention of pretrained Hugging Face models: `patch_model(model, "elu1")`."""

from hf_linattn.cli.versions import check_versions

check_versions()  # before an import fails by itself, in other words

# ruff: noqa: E402
from hf_linattn.errors import LinattnError
from hf_linattn.patching.auto import install
from hf_linattn.patching.checkpoint import from_pretrained
from hf_linattn.patching.contexts import bypassed, patched, use_branches
from hf_linattn.patching.describe import describe, is_linear
from hf_linattn.patching.patch import is_patched, patch_model, unpatch_model
from hf_linattn.patching.peft_adapters import watch
from hf_linattn.registry import available_patches, register

__all__ = [
    "LinattnError",
    "available_patches",
    "bypassed",
    "describe",
    "from_pretrained",
    "is_linear",
    "is_patched",
    "patch_model",
    "patched",
    "register",
    "unpatch_model",
    "use_branches",
]

install()
watch()
