"""Loading: a folder that `save_pretrained` wrote from a patched model, or any ordinary checkpoint."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_linattn.errors import CheckpointError, LinattnError, PlanError
from hf_linattn.patching import FORMAT, patch_model
from hf_linattn.registry import parse
from hf_linattn.seam import NAME
from hf_linattn.sites import find_sites

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
MARKS = (NAME, "attn_implementation", "transformers_weights")


def from_pretrained(name_or_path: str, *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a model: patched as it was saved, or as it is if the folder holds an ordinary checkpoint.

    Args:
        name_or_path: a folder or a hub name.
        auto_class: a class with `from_pretrained`, e.g. `AutoModelForSequenceClassification`; by default the class the
            checkpoint was saved from.
        kwargs: transformers' own (dtype, device_map, attn_implementation for layers that keep theirs, ...).

    Returns:
        The model, in evaluation mode, or (model, loading info) with `output_loading_info=True`.

    Raises:
        CheckpointError: a damaged, incomplete or newer entry, or weights of the patch that are missing.
    """
    hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name_or_path}: config.json cannot be read: {error}") from error
    if NAME not in raw:
        loader = auto_class or _saved_class(raw) or AutoModelForCausalLM
        return loader.from_pretrained(name_or_path, **kwargs)
    entry = raw[NAME]
    groups = check_entry(entry, str(name_or_path))
    config = _config(raw, str(name_or_path))
    implementation = kwargs.pop("attn_implementation", None)
    config._attn_implementation = implementation
    base = _class_for(auto_class, config, raw, str(name_or_path))
    wanted = bool(kwargs.pop("output_loading_info", False))
    subclass = _patching_class(base, groups, entry["sliding"])
    model, info = subclass.from_pretrained(name_or_path, config=config, output_loading_info=True, **kwargs)
    model.__class__ = base  # an ordinary model again: deepcopy, pickle and type checks see the class itself
    lost = sorted(key for key in info["missing_keys"] if f".{NAME}." in f".{key}")
    strange = sorted(key for key in info["unexpected_keys"] if f".{NAME}." in f".{key}")
    if lost or strange:
        what = f"lacks {lost[0]!r}" if lost else f"holds {strange[0]!r}, which its plan does not"
        raise CheckpointError(f"{name_or_path}: the patch's weights do not fit its entry: the checkpoint {what}")
    return (model, info) if wanted else model


def check_entry(entry: Any, where: str) -> list[dict[str, Any]]:
    """The groups of a `linattn` entry, each with patch, options and modules; nothing in it is executed.

    Raises:
        CheckpointError: naming what is wrong.
    """

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: the {NAME!r} entry of config.json {what}")

    if not isinstance(entry, dict):
        raise wrong(f"is not an object but {type(entry).__name__}")
    form = entry.get("format")
    if type(form) is not int or form < 1:
        raise wrong(f"has no usable format number: {form!r}")
    if form > FORMAT:
        raise wrong(f"has format {form}, and this version reads up to {FORMAT}: update hf-linattn")
    if entry.get("part"):
        raise wrong("says that the folder holds a part of a patched model: save the whole model instead")
    if strange := sorted(entry.keys() - {"format", "version", "sliding", "patches"}):
        raise wrong(f"has unknown keys: {', '.join(map(repr, strange))}")
    if entry.get("sliding") not in ("keep", "global", "refuse"):
        raise wrong(f"has sliding={entry.get('sliding')!r}")
    groups = entry.get("patches")
    if not isinstance(groups, list) or not groups:
        raise wrong("lists no patches")
    for group in groups:
        if not isinstance(group, dict) or set(group) != {"patch", "options", "modules"}:
            raise wrong("has a group that is not patch, options and modules")
        names = group["modules"]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise wrong("has a group whose modules are not a list of names")
        if not isinstance(group["options"], dict) or not all(isinstance(v, dict) for v in group["options"].values()):
            raise wrong("has a group whose options are not an object per part")
        try:
            parse(group["patch"], group["options"])
        except LinattnError as error:
            raise wrong(f"cannot be used: {error}") from error
    return groups


def _config(raw: dict[str, Any], where: str) -> PreTrainedConfig:
    """The config without this package's marks, nested ones too."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in MARKS}
        return value

    values = clean(raw)
    kind = values.pop("model_type", None)
    try:
        cls = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    except KeyError:
        raise CheckpointError(f"{where}: transformers {transformers.__version__} has no model type {kind!r}") from None
    config = cls.from_dict(values)
    assert isinstance(config, PreTrainedConfig)
    config.name_or_path = where
    return config


def _saved_class(raw: dict[str, Any]) -> Any:
    names = raw.get("architectures") or []
    return getattr(transformers, str(names[0]), None) if names else None


def _class_for(auto_class: Any, config: PreTrainedConfig, raw: dict[str, Any], where: str) -> type[nn.Module]:
    cls = auto_class or _saved_class(raw)
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is not None:
        try:
            cls = mapping[type(config)]
        except KeyError:
            raise CheckpointError(f"{where}: {auto_class.__name__} has no class for {type(config).__name__}") from None
        cls = cls[0] if isinstance(cls, tuple) else cls
    if cls is None or not isinstance(cls, type):
        raise CheckpointError(f"{where}: config.json names no class of transformers in 'architectures'; pass auto_class=")
    return cls


def _patching_class(base: Any, groups: list[dict[str, Any]], sliding: Any) -> Any:
    """A subclass that is patched before its weights arrive, so that sharded, meta-device and offloaded loads just work."""

    def init(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        sites = {site.name for site in find_sites(self)}
        plan: dict[Any, Any] = {}
        for group in groups:
            for name in group["modules"]:
                plan[_local_name(name, sites, base)] = (group["patch"], group["options"])
        patch_model(self, lambda name, _: plan.get(name), sliding=sliding)

    # the same name: loss function, architectures and class checks go by it
    return type(base.__name__, (base,), {"__init__": init, "__module__": base.__module__, "config_class": base.config_class})


def _local_name(name: str, sites: set[str], base: Any) -> str:
    """The module's name in this class: a bare model lacks the prefix that its head adds, and the other way round."""
    prefix = f"{getattr(base, 'base_model_prefix', '')}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        if candidate in sites:
            return candidate
    raise CheckpointError(f"the saved plan names {name!r}, and {base.__name__} has no such attention module") from PlanError(name)
