"""What patching changes in a model: every change is recorded with its undo as it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from itertools import product
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_linattn.attention.masks import ADDITIVE_MASKS, DENSE_MASKS
from hf_linattn.attention.site import AttentionSite
from hf_linattn.errors import CheckpointError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patching import gguf
from hf_linattn.patching.adapters import adapt, attributes_of
from hf_linattn.patching.cache_layers import CACHE_NAME, put_layer, self_attention_cache
from hf_linattn.patching.config import OwnConfigs
from hf_linattn.patching.discovery import find_sites
from hf_linattn.patching.interface import NAME, UNPATCHED_IMPL, bind_cache_layer
from hf_linattn.patching.module import PatchedAttention

INSTALLATION = "_linattn"
"""Where a patched model keeps its `Installation`, in its `__dict__`."""
PREPARE_CACHE = "_prepare_cache_for_generation"
INIT_BATCHING = "init_continuous_batching"
CACHED_MANAGER = "_cached_continuous_batching_manager"
SAVES = ("save_pretrained", "push_to_hub")


class Installation:
    """One patched model: what was changed, how to undo it, and what others ask about it.

    A context while it is being made: what is raised inside takes back the changes made so far, by the same
    steps as `undo`. Copies and pickles with its model: the steps are functions and modules, no closures.

    Attributes:
        options: dotted name of a module -> its options, by part of the composition.
        notes: dotted name of a module -> what became of its window.
        configs: the copies that the model's configs were replaced by; None where no module is patched.
        has_places: layers of the cache are to be replaced before `generate` begins.
        attached: attention module with a child -> its dotted name when it got that.
    """

    def __init__(
        self, model: PreTrainedModel, options: dict[str, dict[str, dict[str, Any]]], notes: dict[str, str]
    ) -> None:
        self.options, self.notes = options, notes
        self.configs: OwnConfigs | None = None
        self.has_places = False
        self.attached: dict[nn.Module, str] = {}
        self._model = model
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Installation:
        self._replace(self._model, INSTALLATION, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        """Take back every change, the last one first."""
        if copies := self.copies():
            raise UnsupportedModelError(
                f"{copies[0]} was copied with its patch, which would stay in the copy: take it out, call "
                "unpatch_model, and copy layers of the unpatched model"
            )
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def use_own_configs(
        self, entry: dict[str, Any], flags: tuple[str, ...], native: Collection[Any] = ()
    ) -> None:
        """Replace the model's configs by copies that say that it is patched.

        Args:
            entry: the `linattn` entry of config.json.
            flags: what the copies ask of the mask function; see `masks.FLAGS`.
            native: configs of parts without a patch.
        """
        self.configs = OwnConfigs(self._model)
        self._undo.append(self.configs.restore)
        self.configs.use_copies(entry, self._model.config, flags, native)

    def flag_of_masks_before(self, config: Any) -> str:
        """Name the flag by which a copied config goes on making the masks that its original makes."""
        assert self.configs is not None
        before = self.configs.original(config)._attn_implementation
        return DENSE_MASKS if before == "sdpa" else ADDITIVE_MASKS

    def adapt(self, site: AttentionSite) -> None:
        """Have a module with attention code of its own call the interface."""
        if site.adapted:
            attributes = attributes_of(self._model, site.name)
            for name, value in attributes.items():
                self._replace(site.module, name, value)
            self._undo.append(adapt(site.module))
            config = attributes["config"]
            if getattr(config, "attention_type", None) == "block_sparse":
                # BigBird went over to full attention at a short text, and would be loaded without
                self._note(config, "attention_type")
                config.attention_type = "original_full"

    def attach(self, site: AttentionSite, child: PatchedAttention) -> None:
        """Put a child into an attention module, and the hook that hands it the state of each call."""
        self._undo.append(functools.partial(_detach, site.module))
        site.module.add_module(NAME, child)
        self.attached[site.module] = site.name
        self._undo.append(site.module.register_forward_pre_hook(bind_cache_layer, with_kwargs=True).remove)
        if (child.keeps_state or child.keeps_gates or child.drops_window) and _has_own_slot(site):
            child.has_place = self.has_places = True

    def copies(self) -> list[str]:
        """Name modules whose patch is a copy, as that of a layer copied within the model is."""
        return [name for name, module in self._patched().items() if module not in self.attached]

    def misplaced(self) -> list[str]:
        """Name modules whose patch was made for another, and those that have none any more."""
        patched = self._patched()
        made_for = {name: str(x.get_submodule(NAME).where).split(" ")[0] for name, x in patched.items()}
        moved = [name for name, was in made_for.items() if not _is_at(was, name)]
        return moved + [x for x in self.attached.values() if not any(_is_at(x, name) for name in patched)]

    def _patched(self) -> dict[str, nn.Module]:
        return {name: x for name, x in self._model.named_modules() if NAME in x._modules}

    def keep_native(self, module: nn.Module, implementation: str) -> None:
        """Let a module that is not patched go on with its own attention implementation."""
        self._replace(module, UNPATCHED_IMPL, implementation)

    def prepare_caches(self) -> None:
        """Have `generate` put the layers of patched modules into its cache before it asks that anything."""
        if self.has_places and hasattr(self._model, PREPARE_CACHE):
            self._replace(self._model, PREPARE_CACHE, _PreparedCache(_prepare_cache, self._model))

    def serve_batches(self) -> None:
        """Have continuous batching (`generate_batch`, `transformers serve`) keep the patch."""
        if self.configs is not None and hasattr(self._model, INIT_BATCHING):
            self._replace(self._model, INIT_BATCHING, functools.partial(_init_batching, self._model))

    def refuse_saving(self, unsaved: dict[str, str]) -> None:
        """Have the model, and every model in it, refuse to be saved.

        Args:
            unsaved: options that config.json cannot hold -> what is there; nothing is refused where empty.
        """
        if unsaved:
            names = ", ".join(f"{option} ({what})" for option, what in unsaved.items())
            self._refuse_saves(
                f"config.json cannot hold {names}. A checkpoint names patches and carries no code: "
                "register a patch of your own instead (docs/adding-an-attention.md), or save the weights "
                "alone, by torch.save(model.state_dict(), ...), and patch in code before they are loaded"
            )

    def drop_gguf_marks(self) -> None:
        """Take a GGUF file's marks off a model whose weights were unpacked: it saves and trains as any other.

        One whose weights are still packed refuses to be saved.
        """
        if not gguf.is_marked(self._model):
            return
        if (name := gguf.packed_weight(self._model)) is not None:
            self._refuse_saves(
                f"{name} is still packed in GGUF blocks, and no checkpoint of transformers holds those. Load "
                "the model with quantization_config=GgufConfig(dequantize=True), then patch and save it"
            )
            return
        copies = [] if self.configs is None else [known.copied for known in self.configs.copies]
        places = [(self._model, gguf.MODEL_MARKS), *((copied, gguf.CONFIG_MARKS) for copied in copies)]
        for owner, marks in places:
            for mark in marks:
                self._note(owner, mark)
                owner.__dict__.pop(mark, None)

    def _refuse_saves(self, reason: str) -> None:
        parts = [part for part in self._model.modules() if isinstance(part, PreTrainedModel)]
        for part, method in product(parts, SAVES):
            self._replace(part, method, functools.partial(_refuse_save, reason))

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute past nn.Module, which would register modules and parameters."""
        self._note(module, name)
        module.__dict__[name] = value

    def _note(self, owner: Any, name: str) -> None:
        """Record what an attribute is before it changes."""
        earlier = (owner.__dict__[name],) if name in owner.__dict__ else ()
        self._undo.append(functools.partial(_put_back, owner, name, earlier))


def installation_of(model: nn.Module) -> Installation | None:
    """Look up what `patch_model` did to a transformers model; None if it is not patched."""
    return model.__dict__.get(INSTALLATION)


def patched_part(model: nn.Module) -> str | None:
    """Name a part of a model that is patched by itself; None where there is none."""
    parts = ((name, part) for name, part in model.named_modules() if part is not model)
    return next((name for name, part in parts if installation_of(part) is not None), None)


def native_implementation(site: AttentionSite, installation: Installation | None) -> str:
    """Name the attention implementation of a module, that of before where its model is patched.

    Args:
        site: of the module.
        installation: of its model; None for an unpatched one.
    """
    config: Any = site.view.config
    if installation is not None and installation.configs is not None:
        config = installation.configs.original(config)
    return config._attn_implementation or "eager"


def _put_back(owner: Any, name: str, earlier: tuple[Any, ...]) -> None:
    owner.__dict__.pop(name, None)
    if earlier:
        owner.__dict__[name] = earlier[0]


def _detach(module: nn.Module) -> None:
    module._modules.pop(NAME, None)


def _is_at(name: str, place: str) -> bool:
    """Tell whether a place is that of a name; wrappers put names of their own in between."""
    parts = iter(place.split("."))
    return all(part in parts for part in name.split("."))


def _has_own_slot(site: AttentionSite) -> bool:
    cross = "Cross" in type(site.module).__name__
    causal = bool(getattr(site.view, "is_causal", False))
    return causal and not cross and site.forward_info.slot == "self" and site.layer_idx is not None


def _prepare_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Stand before the model's own method: the layers exist before generate() asks the cache anything."""
    output = getattr(type(model), PREPARE_CACHE)(model, generation_config, model_kwargs, *args, **kwargs)
    cache = self_attention_cache(model_kwargs.get(CACHE_NAME))
    if cache is not None:
        for module in model.modules():  # as they are by now: layers may have been wrapped, moved or taken out
            child: Any = module._modules.get(NAME)
            if child is None or not child.has_place or child.bypass is not None:
                continue
            layer: Any = module.layer_idx
            if layer >= len(cache.layers) and cache.layer_class_to_replicate is None:
                continue  # of a layer that is left out, as an early exit does; a forward asks again
            put_layer(child, cache, layer, f"{type(module).__name__} {layer}")
        if generation_config.is_assistant:
            cache.activate_past_recording()
    return output


class _PreparedCache(functools.partial[Any]):
    """Stand before the model's own method, as `_prepare_cache`."""

    @property
    def __func__(self) -> Any:
        """The model's own, which Kyutai's model binds to its codec."""
        return getattr(type(self.args[0]), PREPARE_CACHE)


def _init_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Stand before the model's own method: a manager of ours in place of transformers' own."""
    try:
        from transformers import ContinuousBatchingConfig

        from hf_linattn.patching.batching import PatchedBatchingManager
    except ImportError as error:
        raise UnsupportedCallError(
            f"continuous batching of patched models needs transformers 5.20: {error}"
        ) from error
    if getattr(model, CACHED_MANAGER, None) is not None:
        return getattr(type(model), INIT_BATCHING)(model)
    return PatchedBatchingManager(
        model,
        find_sites(model),
        model.generation_config if generation_config is None else generation_config,
        ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config,
        workload_hints,
    )


def _refuse_save(reason: str, *args: Any, **kwargs: Any) -> None:
    """Stand before the model's own method: nothing is written that could not be loaded."""
    raise CheckpointError(f"nothing was saved: {reason}")
