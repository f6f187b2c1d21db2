"""Load models: a folder that `save_pretrained` wrote from a patched model, or any ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_linattn.cli.files import read_json
from hf_linattn.errors import CheckpointError, DataError, LinattnError, OptionError
from hf_linattn.patching import gguf
from hf_linattn.patching.discovery import find_sites
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.loading import TRUST, gguf_parts, model_inside, trust
from hf_linattn.patching.patch import FORMAT, Sliding, patch_model, share_heads
from hf_linattn.registry import parse

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
KEYS = {"format", "version", "sliding", "patches"}
MARKS = (NAME, "attn_implementation", "transformers_weights")
CONFIG_ERRORS = (StrictDataclassError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What config classes raise on values that make no sense."""
WEIGHTS = ("dtype", "torch_dtype", "quantization_config")
"""Keywords that transformers reads for the weights; the config would swallow them."""


def from_pretrained(name_or_path: str | Path, *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a model: patched as it was saved, or as it is if the folder holds an ordinary checkpoint.

    Args:
        name_or_path: a folder, a hub name, or FILE.gguf in one of them, whose weights are unpacked.
        auto_class: a class with `from_pretrained`, e.g. `AutoModelForSequenceClassification`; by default the
            class the checkpoint was saved from.
        kwargs: transformers' own (dtype, device_map, attributes of the config, attn_implementation for layers
            that keep theirs, gguf_file for an unpatched model from that file, ...). With trust_remote_code
            the code beside a patched model runs where transformers has none for its type, and only there.

    Returns:
        The model, in evaluation mode, or (model, loading info) with `output_loading_info=True`.

    Raises:
        CheckpointError: a damaged, incomplete or newer entry, or weights of the patch that are missing.

    Example:
        >>> from hf_linattn import describe, from_pretrained, patch_model
        >>> model = patch_model(from_pretrained("examples/base"), {"0-1": "elu1"})
        >>> model.save_pretrained("patched")
        >>> [row.patch for row in describe(from_pretrained("patched"))]
        ['elu1', 'elu1', 'softmax', 'softmax', 'softmax', 'softmax']
    """
    if auto_class is not None and not hasattr(auto_class, "from_pretrained"):
        raise OptionError(f"auto_class must be a class with from_pretrained, got {auto_class!r}")
    where, kwargs = str(name_or_path), {**trust(), **kwargs}
    if gguf_parts(where)[1]:
        return gguf.load_unpacked(auto_class or transformers.AutoModelForCausalLM, where, **kwargs)
    if kwargs.get("gguf_file") is not None:  # which holds the config too
        return gguf.load(auto_class or transformers.AutoModelForCausalLM, where, **kwargs)
    raw = _read(where, kwargs)
    if NAME not in raw:
        # not imported with this module: it takes as long as all of this package
        loader = auto_class or saved_class(raw) or transformers.AutoModelForCausalLM
        return loader.from_pretrained(name_or_path, **kwargs)
    if _has_its_own_code(raw) and kwargs.get("trust_remote_code"):
        # transformers runs it, and comes back to this package with the class that it finds (`patching.auto`)
        return (auto_class or _auto_class(raw)).from_pretrained(name_or_path, **kwargs)
    if "config" in kwargs:
        raise OptionError(
            f"{where} holds a patched model: pass attributes of its config by name, not config="
        )
    weights = {key: kwargs.pop(key) for key in WEIGHTS if key in kwargs}
    implementation = kwargs.pop("attn_implementation", None)
    config, kwargs = _config(raw, where, kwargs)
    config._attn_implementation = implementation
    base = _class_for(auto_class or saved_class(raw), config, where)
    return load_weights(base, config, raw[NAME], where, **weights, **kwargs)


def load_weights(
    base: Any, config: PreTrainedConfig, entry: dict[str, Any], where: str, **kwargs: Any
) -> Any:
    """Make a model of a class, patched as an entry of config.json says, and load its weights.

    Args:
        base: a model class of transformers.
        config: without the marks of this package.
        entry: the `linattn` entry.
        where: the folder or hub name.
        kwargs: for the class's `from_pretrained`.

    Returns:
        As `from_pretrained`.

    Raises:
        CheckpointError: the entry or the weights do not fit.
    """
    subclass = patching_class(base, check_entry(entry, where), entry["sliding"], where)
    wanted = bool(kwargs.pop("output_loading_info", False))
    lenient = bool(kwargs.pop("ignore_mismatched_sizes", False))
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    _check_index(Path(where, SAFE_WEIGHTS_INDEX_NAME))
    try:
        model, info = subclass.from_pretrained(where, config=config, **kwargs)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{where}: the weights cannot be read: {error}") from error
    model.__class__ = base  # an ordinary model again: deepcopy, pickle and type checks see the class itself
    saved_class = base.__name__ in (config.architectures or ())
    _check_weights(info, where, same_class=saved_class, lenient=lenient)
    share_heads(model)
    return (model, info) if wanted else model


def _read(where: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Read config.json as it stands."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(where, **{key: kwargs[key] for key in HUB if key in kwargs})
    except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two: not a JSON object
        raise CheckpointError(f"{where}: config.json cannot be read{model_inside(where)}: {error}") from error
    if not isinstance(raw, dict) or not raw.keys() - {"_commit_hash"}:  # which older transformers adds
        raise CheckpointError(f"{where}: there is no config.json that describes a model{model_inside(where)}")
    return raw


def _check_index(path: Path) -> None:
    """Refuse a list of shards that was not written to its end, which transformers reads without a check."""
    if path.is_file():
        try:
            whole = isinstance(read_json(path).get("weight_map"), dict)
        except DataError as error:
            raise CheckpointError(f"{path.parent}: the weights cannot be read: {error}") from error
        if not whole:
            raise CheckpointError(f"{path.parent}: the weights cannot be read: {path.name} lists no shards")


def _check_weights(info: dict[str, Any], where: str, *, same_class: bool, lenient: bool) -> None:
    """Refuse a checkpoint that lacks weights of the patch or of its own class, or has others.

    Args:
        info: what transformers says about the keys.
        where: for messages.
        same_class: the model's class is the saved one, so that not even a head is missing.
        lenient: weights of another shape were asked to be passed over.
    """
    complaints = {
        "lacks": (info["missing_keys"], same_class),
        "has no place for": (info["unexpected_keys"], False),
        "has another shape of": ({key for key, *_ in info["mismatched_keys"]}, not lenient),
    }
    for complaint, (keys, all_count) in complaints.items():
        if wrong := sorted(key for key in keys if all_count or NAME in key.split(".")):
            raise CheckpointError(f"{where}: the weights do not fit config.json: it {complaint} {wrong[0]!r}")


def check_entry(entry: Any, where: str) -> list[dict[str, Any]]:
    """Read the groups of a `linattn` entry, each with patch, options and modules; nothing in it is executed.

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
    if strange := sorted(entry.keys() - KEYS):
        raise wrong(f"has unknown keys: {', '.join(map(repr, strange))}")
    if entry.get("sliding") not in get_args(Sliding):
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
        options = group["options"]
        if not isinstance(options, dict) or not all(isinstance(values, dict) for values in options.values()):
            raise wrong("has a group whose options are not an object per part")
        try:
            parse(group["patch"], options)
        except LinattnError as error:
            raise wrong(f"cannot be used: {error}") from error
    return groups


def _config(
    raw: dict[str, Any], where: str, kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Build the config without this package's marks; return with it the keywords that it does not take."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in MARKS}
        return value

    values = clean(raw)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        advice = ""
        if _has_its_own_code(raw):
            advice = f"; its code lies beside it: read it, then trust_remote_code=True, or {TRUST}=1, runs it"
        raise CheckpointError(
            f"{where}: transformers {transformers.__version__} has no model type {kind!r}{advice}"
        )
    try:
        config, rest = CONFIG_MAPPING[kind].from_dict(values, return_unused_kwargs=True, **kwargs)
    except CONFIG_ERRORS as error:
        raise CheckpointError(f"{where}: config.json does not describe a {kind} model: {error}") from error
    config.name_or_path = where
    return config, rest


def _has_its_own_code(raw: dict[str, Any]) -> bool:
    """Tell whether the code of a model lies beside it, and transformers has none for its type."""
    return isinstance(raw.get("auto_map"), dict) and raw.get("model_type") not in CONFIG_MAPPING


def _auto_class(raw: dict[str, Any]) -> Any:
    """Find the auto class for the class that a model with its own code was saved from."""
    names = raw.get("architectures")
    saved = str(names[0]) if isinstance(names, list) and names else ""
    for key, place in raw["auto_map"].items():
        found = getattr(transformers, key, None)
        if hasattr(found, "_model_mapping") and str(place).rpartition(".")[2] == saved:
            return found
    return transformers.AutoModelForCausalLM


def saved_class(raw: dict[str, Any]) -> type[PreTrainedModel] | None:
    """Find the class of transformers the model was saved from; no other name in the file is looked up."""
    names = raw.get("architectures")
    cls = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def _class_for(cls: Any, config: PreTrainedConfig, where: str) -> Any:
    """Find the model class that `cls`, an auto class or a model class, means for this config."""
    if cls is None:
        raise CheckpointError(
            f"{where}: config.json names no class of transformers in 'architectures'; pass auto_class="
        )
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is not None and type(config) in mapping:
        classes = mapping[type(config)]
        return classes[0] if isinstance(classes, tuple) else classes
    if mapping is not None or not isinstance(config, getattr(cls, "config_class", None) or ()):
        raise CheckpointError(f"{where}: {cls.__name__} has no class for {type(config).__name__}")
    return cls


def patching_class(base: Any, groups: list[dict[str, Any]], sliding: Any, where: str) -> Any:
    """Make a subclass that is patched before its weights arrive: sharded and offloaded loads just work."""

    def init(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        try:
            plan = _plan(self, groups)
            patch_model(self, lambda name, _: plan.get(name), sliding=sliding)
            if getattr(config, "quantization_config", None) is not None:  # quantisers pass these modules over
                self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), rf".+\.{NAME}\..+"}
        except LinattnError as error:
            raise CheckpointError(
                f"{where}: the {NAME!r} entry does not fit {base.__name__}: {error}"
            ) from error

    # the same name: loss function, architectures and class checks go by it
    members = {"__init__": init, "__module__": base.__module__, "config_class": base.config_class}
    return type(base.__name__, (base,), members)


def _plan(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Map module names to (patch, options), by the names that this class gives its modules.

    A bare model lacks the prefix that its head adds, and the other way round.
    """
    sites = {site.name for site in find_sites(model)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    plan: dict[str, Any] = {}
    for group in groups:
        for name in group["modules"]:
            local = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in sites), None)
            if local is None:
                raise CheckpointError(f"it has no attention module {name!r}")
            if local in plan:
                raise CheckpointError(f"{name!r} is named twice")
            plan[local] = (group["patch"], group["options"])
    return plan
