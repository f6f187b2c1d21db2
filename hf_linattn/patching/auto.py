"""Folders and configs of patched models, in transformers' own hands.

`AutoModelForCausalLM.from_pretrained`, `pipeline`, trainers and evaluation harnesses all end in two class
methods of `PreTrainedModel`. Once this package is imported, they load a patched folder as
`hf_linattn.from_pretrained` does, and make a patched model of a patched model's config. `save_pretrained`
writes a patched model as a whole or not at all. Everything else goes through as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_linattn.cli.files import filling, writing
from hf_linattn.errors import CheckpointError, UnsupportedModelError
from hf_linattn.patching.checkpoint import check_entry, from_pretrained, load_weights, patching_class
from hf_linattn.patching.config import GUARD, unmark
from hf_linattn.patching.installation import INSTALLATION, installation_of, patched_part
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.peft_adapters import naming_patches

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files that transformers writes a model's weights to."""


def _nested(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            yield from _nested(inner)


def _entry(config: Any) -> dict[str, Any] | None:
    """The `linattn` entry of a config that was read from a patched folder or belongs to a patched model."""
    return config.__dict__.get(NAME) if isinstance(config, PreTrainedConfig) else None


def _unmarked(config: PreTrainedConfig, implementation: str | None) -> PreTrainedConfig:
    """A copy without the marks of this package.

    Args:
        config: with them.
        implementation: the attention of layers that keep their own; transformers' choice for None or our own.
    """
    plain = copy.deepcopy(config)
    for part in _nested(plain):
        unmark(part)
        part.__dict__.pop("transformers_weights", None)  # read from a folder; a model's own config has none
        if part._attn_implementation == NAME:
            part._attn_implementation = None
    if implementation not in (None, NAME):
        plain._attn_implementation = implementation
    return plain


def _refuse_unpatched(model: Any, where: str) -> None:
    """Refuse a model that names our attention and has none; `model` may be (model, loading info)."""
    inside = model[0] if isinstance(model, tuple) else model
    if inside.config._attn_implementation == NAME and INSTALLATION not in inside.__dict__:
        raise UnsupportedModelError(
            f"{where} holds no patched model, and was asked for with attn_implementation={NAME!r}, as a "
            "trainer does that loads a second copy of a model by its name. Save the patched model and "
            "train from that folder, or give the trainer its copy (ref_model=copy.deepcopy(model))."
        )


def _refuse_patched_parts(model: Any) -> None:
    """Refuse to save a model of which a part was patched by itself: its config.json would not say so."""
    name = patched_part(model)
    if name is not None:
        raise CheckpointError(
            f"nothing was saved: {name!r} of this {type(model).__name__} is patched by itself, and would be "
            f"loaded without its patch. Save that part (model.{name}.save_pretrained), or unpatch it and "
            "patch the whole model"
        )


def _refuse_changed_layers(model: Any) -> None:
    """Refuse to save a patched model whose layers are others by now: config.json names those of before."""
    names = [] if (installation := installation_of(model)) is None else installation.misplaced()
    if names:
        raise CheckpointError(
            f"nothing was saved: layers of this {type(model).__name__} were copied, moved or taken out after "
            f"patch_model ({names[0]}), and config.json would name patches of other layers. Change layers of "
            "the unpatched model, then patch it; load_state_dict() brings weights of the patch over"
        )


def _refuse_unnamed_quantisation(model: Any, folder: Path) -> None:
    """Refuse weights that torchao's `quantize_` changed: no config.json could say how to read them."""
    changed = (name for name, p in model.named_parameters() if type(p).__module__.startswith("torchao."))
    name = next(changed, None)
    if name is not None and getattr(model, "hf_quantizer", None) is None:
        raise CheckpointError(
            f"{folder}: nothing was saved: {name} was quantised by torchao's quantize_, which config.json "
            "does not know of. Save the model before that, or quantise while loading: "
            "from_pretrained(..., quantization_config=TorchAoConfig(...))"
        )


def _clear(folder: Path) -> None:
    """Delete a model that is about to be replaced, its entry first: nothing loads half of each."""
    (folder / "config.json").unlink(missing_ok=True)
    for path in folder.iterdir():
        if WEIGHTS.fullmatch(path.name):
            path.unlink()


def install() -> None:
    """Put the three methods in place, once a process."""
    load, make = (vars(PreTrainedModel)[name].__func__ for name in ("from_pretrained", "_from_config"))
    save = PreTrainedModel.save_pretrained
    names = signature(save)

    def save_as_a_whole(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save a model; a patched one replaces what is in the folder once all of it is written."""
        given = names.bind(self, save_directory, *args, **kwargs).arguments
        _refuse_patched_parts(self)
        _refuse_changed_layers(self)
        alone = getattr(self, "should_save_on_this_rank", bool)(given.get("is_main_process", True))
        elsewhere = given.get("push_to_hub") or given.get("distributed_checkpoint")
        if INSTALLATION not in self.__dict__ or not alone or elsewhere:
            with naming_patches(self):
                save(self, save_directory, *args, **kwargs)
            return
        folder = Path(save_directory)
        _refuse_unnamed_quantisation(self, folder)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            with writing(folder, CheckpointError):
                folder.mkdir(parents=True, exist_ok=True)
            with filling(folder, CheckpointError) as partial, naming_patches(self):
                save(self, partial, *args, **kwargs)
                if (partial / "config.json").exists() and not given.get("variant"):
                    _clear(folder)
        except BaseException:
            for path in new:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise

    def load_patched_too(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load a model, patched as it was saved if it was; see transformers' `from_pretrained`."""
        entry = _entry(config)
        if entry is not None:
            plain = _unmarked(config, kwargs.pop("attn_implementation", None))
            return load_weights(cls, plain, entry, str(name), **kwargs)
        try:
            model = load(cls, name, *args, config=config, **kwargs)
        except OSError as error:
            if GUARD not in str(error) or config is not None:
                raise
            kwargs.pop("_from_auto", None)
            if kwargs.get("attn_implementation") == NAME:
                del kwargs["attn_implementation"]
            return from_pretrained(name, auto_class=cls, **kwargs)
        _refuse_unpatched(model, str(name))
        return model

    def make_patched_too(cls: Any, config: PreTrainedConfig, **kwargs: Any) -> Any:
        """Make a model with new weights, patched if the config is a patched model's."""
        entry = _entry(config)
        if entry is None:
            return make(cls, config, **kwargs)
        where = f"the config of a patched {config.model_type} model"
        subclass = patching_class(cls, check_entry(entry, where), entry["sliding"], where)
        model = make(subclass, _unmarked(config, kwargs.pop("attn_implementation", None)), **kwargs)
        model.__class__ = cls
        return model

    setattr(PreTrainedModel, save.__name__, functools.update_wrapper(save_as_a_whole, save))
    for method, original in ((load_patched_too, load), (make_patched_too, make)):
        setattr(PreTrainedModel, original.__name__, classmethod(functools.update_wrapper(method, original)))
