"""Folders and configs of patched models, in transformers' own hands.

`AutoModelForCausalLM.from_pretrained`, `pipeline`, trainers and evaluation harnesses all end in two class
methods of `PreTrainedModel`. Once this package is imported, they load a patched folder as
`hf_linattn.from_pretrained` does, and make a patched model of a patched model's config. Everything else goes
through as before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patching.checkpoint import check_entry, from_pretrained, load_weights, patching_class
from hf_linattn.patching.config import GUARD, unmark
from hf_linattn.patching.installation import INSTALLATION
from hf_linattn.patching.interface import NAME


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


def install() -> None:
    """Put both methods in place, once a process."""
    load, make = (vars(PreTrainedModel)[name].__func__ for name in ("from_pretrained", "_from_config"))

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

    for method, original in ((load_patched_too, load), (make_patched_too, make)):
        setattr(PreTrainedModel, original.__name__, classmethod(functools.update_wrapper(method, original)))
