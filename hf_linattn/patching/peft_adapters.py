"""Adapters of peft name the patches that they were trained with, and ask for the same where they are loaded.

An adapter holds no patch. On a model with another one, or with none, it would compute something else, without
a word. peft is imported by few and takes seconds, so its classes are changed when somebody else imports it.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from hf_linattn.errors import CheckpointError
from hf_linattn.patching.installation import INSTALLATION
from hf_linattn.patching.interface import NAME

PEFT_MODEL = "peft.peft_model"
"""Where `PeftModel` is: the module of peft that is complete last."""


def watch() -> None:
    """Change peft's classes, now or when they are imported."""
    if PEFT_MODEL in sys.modules:
        _install(sys.modules[PEFT_MODEL])
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Wait for one import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != PEFT_MODEL:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_install(module: ModuleType) -> None:
                run(module)
                _install(module)

            setattr(spec.loader, "exec_module", run_and_install)  # noqa: B010 - mypy refuses the assignment
        return spec


def _patches(model: nn.Module) -> list[dict[str, Any]]:
    """List which patch with which options is in which modules, as config.json and JSON have it."""
    patched = next((part for part in model.modules() if INSTALLATION in part.__dict__), None)
    entry = {} if patched is None else patched.config.__dict__.get(NAME, {})
    groups: list[dict[str, Any]] = json.loads(json.dumps(entry.get("patches", []), default=str))
    return groups


@contextmanager
def naming_patches(model: nn.Module) -> Iterator[None]:
    """Have configs of adapters name the patches of their model while they are written."""
    configs = list(getattr(model, "peft_config", {}).values())
    patches = _patches(model) if configs else []
    for config in configs:
        config.__dict__.update({NAME: patches} if patches else {})
    try:
        yield
    finally:
        for config in configs:
            config.__dict__.pop(NAME, None)


def _said(patches: list[dict[str, Any]]) -> str:
    return " and ".join(f"{group['patch']!r} {group['options'] or ''}".rstrip() for group in patches)


def check(model: nn.Module, config: Any, adapter: str) -> None:
    """Compare the patches that an adapter was trained with, if its config names them, with those of a model.

    Raises:
        CheckpointError: the adapter holds weights of patches that the model does not have.

    Warns:
        UserWarning: they differ otherwise.
    """
    trained = config.__dict__.pop(NAME, None)
    if not trained or trained == (here := _patches(model)):
        return
    modules = " in other modules" if _said(here) == _said(trained) else ""
    message = (
        f"adapter {adapter!r} was trained on a model with {_said(trained)}, and this one has "
        f"{_said(here) or 'no patch'}{modules}. Load the patched folder that it was trained from, or put the "
        "same patch on by patch_model before the adapter"
    )
    held = NAME in (getattr(config, "modules_to_save", None) or ())
    if held and [group["patch"] for group in here] != [group["patch"] for group in trained]:
        raise CheckpointError(f"{message}. Its weights of the patch have no place here")
    warnings.warn(f"{message}. Its outputs are not those of its training", stacklevel=2)


def _install(peft_model: ModuleType) -> None:
    """Put the methods in place, once a process; a peft that has others is left as it is."""
    try:
        from peft import config, tuners

        cls: Any = peft_model.PeftModel
        base: Any = config.PeftConfigMixin
        tuner: Any = tuners.tuners_utils.BaseTuner
        make, to_dict = base.from_peft_type.__func__, base.to_dict
        inject, prompts, save = tuner.inject_adapter, cls._setup_prompt_encoder, cls.save_pretrained
    except (ImportError, AttributeError):
        return

    @functools.wraps(make)
    def from_peft_type(cls: Any, **kwargs: Any) -> Any:
        patches = kwargs.pop(NAME, None)
        config = make(cls, **kwargs)
        config.__dict__.update({} if patches is None else {NAME: patches})
        return config

    @functools.wraps(to_dict)
    def to_dict_with_patches(self: Any) -> dict[str, Any]:
        patches = self.__dict__.get(NAME)
        return {**to_dict(self), **({} if patches is None else {NAME: patches})}

    @functools.wraps(inject)
    def checked_inject(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        check(model, self.peft_config[adapter_name], adapter_name)
        return inject(self, model, adapter_name, *args, **kwargs)

    @functools.wraps(prompts)
    def checked_prompts(self: Any, adapter_name: str) -> Any:
        check(self.base_model, self.peft_config[adapter_name], adapter_name)
        return prompts(self, adapter_name)

    @functools.wraps(save)
    def save_with_patches(self: Any, *args: Any, **kwargs: Any) -> Any:
        with naming_patches(self):
            return save(self, *args, **kwargs)

    base.from_peft_type = classmethod(from_peft_type)  # type: ignore[arg-type]
    base.to_dict = to_dict_with_patches
    tuner.inject_adapter = checked_inject
    cls._setup_prompt_encoder, cls.save_pretrained = checked_prompts, save_with_patches
