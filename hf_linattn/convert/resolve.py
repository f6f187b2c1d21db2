"""The patch of a conversion, spelled out from what was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from hf_linattn.attention import LinearAttention
from hf_linattn.convert.__main__ import ConvertArguments
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.loading import explain_missing
from hf_linattn.registry import find, names_in, parse, signature


def with_patch(arguments: ConvertArguments) -> ConvertArguments:
    """The patch spelled out: what a patched model has, with a learned layer in front where wanted.

    Raises:
        TrainingError: there is no such model.
        OptionError: a new patch for a patched model, or a front for what takes none.
    """
    with explain_missing(f"cannot load --model {arguments.model}", TrainingError):
        config = AutoConfig.from_pretrained(arguments.model)
    if hasattr(config, NAME):
        if arguments.patch is not None or arguments.learn_front or arguments.options:
            raise OptionError(
                f"--model {arguments.model} is patched already, and its patch is what is trained: leave out "
                "--patch, --options and --learn-front, or give the unpatched model"
            )
        return arguments
    patch = "hedgehog" if arguments.patch is None else arguments.patch
    if not arguments.learn_front:
        return replace(arguments, patch=patch)
    if isinstance(patch, str):
        patch, options = fronted(patch)
        return replace(arguments, patch=patch, options={**options, **(arguments.options or {})})
    layers = {}
    for key, given in patch.items():
        spec, own = given if isinstance(given, list | tuple) else (given, {})
        spec, options = fronted(spec) if spec != "softmax" else (spec, {})
        layers[key] = [spec, {**options, **own}]
    return replace(arguments, patch=layers)


def fronted(spec: str) -> tuple[str, dict[str, Any]]:
    """A composition with a learned layer in front of its feature map, and the options that say so.

    >>> fronted("window+elu1")
    ('window+linear', {'linear': {'feature_map': 'elu1', 'front': True}})
    >>> fronted("gated")
    ('gated', {'gated': {'front': True}})

    Raises:
        OptionError: it holds no feature map.
    """
    names = names_in(spec)
    maps = [name for name in names if issubclass(find(name), LinearAttention)]
    if len(maps) != 1:
        raise OptionError(f"--learn-front: {spec!r} has no feature map that a layer could stand in front of")
    own = "front" in signature(find(maps[0]))
    options = {maps[0]: {"front": True}} if own else {"linear": {"feature_map": maps[0], "front": True}}
    composed = spec if own else "+".join("linear" if name in maps else name for name in names)
    parse(composed, options)
    return composed, options
