"""What a conversion is to do, resolved once from its arguments: patch, objective, texts, stages, folders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from hf_linattn.attention import LinearAttention
from hf_linattn.convert.arguments import ConvertArguments
from hf_linattn.convert.outputs import LAYERS, OWN_EVAL_TEXT, OWN_TEXT, conversion_folder
from hf_linattn.convert.presets import NAMED, RECALL, default_patch, default_preset, merge_options
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.finetune.model import count_parameters, load_config
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.loading import load_tokenizer
from hf_linattn.registry import find, names_in, parse, signature
from hf_linattn.training.folder import RunFolder
from hf_linattn.training.objectives import (
    Objective,
    build_objective,
    build_states_objective,
    choose_objective,
)

HYBRID = "hybrid"
SELF = "self"
"""In the place of a text: what the model writes itself."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a conversion.

    Attributes:
        name: "transfer", "distill" or "finetune".
        source: folder or Hub name of the model that it begins with, which the stage before leaves.
        folder: of the model that it leaves.
        tokens: to train on, before they are rounded up to whole steps.
        length: tokens per row.
        rate: peak learning rate; None for the default of the model's size.
        objective: what its model predicts, in rows of `length` tokens.
    """

    name: str
    source: str
    folder: Path
    tokens: int
    length: int
    rate: float | None
    objective: Objective


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion, as far as it is known before a model is loaded.

    Attributes:
        arguments: the options, their patch spelled out.
        folder: the output folder.
        tokenizer: of all texts.
        objective: what the original predicts, in rows of `block_size` tokens.
        stages: in their order, at least one.
        kept: folder of the model some of whose layers were chosen to stay softmax, behind stage transfer or
            before all stages; None where none are.
        sizes_layers: what each layer keeps is to be measured before it is patched.
        layers: the patch of each attention module by its name, where that was; else None.
    """

    arguments: ConvertArguments
    folder: RunFolder
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    stages: tuple[StagePlan, ...]
    kept: Path | None = None
    sizes_layers: bool = False
    layers: dict[str, Any] | None = None

    @property
    def patch(self) -> str | dict[str, Any] | None:
        """The patch of the model; None for what it has."""
        return self.layers or self.arguments.patch

    @property
    def options(self) -> dict[str, Any] | None:
        """The options of the patch; None for none, or where its layers say them."""
        return self.arguments.options if self.layers is None else None

    @property
    def transfers(self) -> bool:
        """Whether a stage trains the parameters of the patch."""
        return any(stage.name == "transfer" for stage in self.stages)

    @property
    def original(self) -> str:
        """Folder or Hub name of the model that the converted one is to be like."""
        return self.arguments.teacher or self.arguments.model

    @property
    def text(self) -> str:
        """What is read for --data."""
        own = self.arguments.data == SELF
        return str(self.folder.path / OWN_TEXT) if own else self.arguments.data

    @property
    def eval_text(self) -> str | None:
        """What is read for --eval-data."""
        own = self.arguments.eval_data == SELF
        return str(self.folder.path / OWN_EVAL_TEXT) if own else self.arguments.eval_data


def resolve(arguments: ConvertArguments) -> ConversionPlan:
    """Resolve the arguments of a conversion; reads configs and the tokenizer, and writes nothing.

    Raises:
        TrainingError: there is no such model, or it cannot learn what it is to learn.
        OptionError: the patch does not fit.
        DataError: the tokenizer cannot be used.
    """
    config = load_config(arguments.model)
    teacher = arguments.teacher
    original = config if teacher is None else load_config(teacher, "--teacher")
    if _learns_states(arguments, original) and "ce_weight" in arguments.filled:
        arguments = replace(arguments, ce_weight=0.0)  # there is no text to predict
    asked = f"--preset {RECALL}" if arguments.preset == RECALL else "--keep"
    if arguments.preset in NAMED:
        arguments = copy.copy(arguments)
        arguments.preset = _preset_for(arguments, config)
    sizes_layers = arguments.chosen_preset.sizes_layers and not (arguments.patch or hasattr(config, NAME))
    arguments = resolve_patch(arguments, config)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    folder = conversion_folder(arguments.output_dir)
    names = arguments.chosen_stages()
    objective = _resolve_objective(arguments, names, config, original, tokenizer)
    kept = None
    if arguments.cache_teacher is not None:
        _check_cacheable(objective, names)
    sources = [arguments.model, *(str(folder.path / name) for name in names[:-1])]
    if arguments.keep is not None:
        _check_can_choose(asked, arguments, config, objective)
        kept = folder.path / LAYERS / "hybrid"
        sources[1 if "transfer" in names else 0] = str(kept)
    stages = tuple(
        StagePlan(
            name,
            source,
            folder.path / name,
            arguments.stage_tokens(name),
            arguments.length(name),
            getattr(arguments, f"{name}_lr"),
            _with_rows_of(objective, arguments.length(name), arguments, tokenizer),
        )
        for name, source in zip(names, sources, strict=True)
    )
    return ConversionPlan(arguments, folder, tokenizer, objective, stages, kept, sizes_layers)


def _preset_for(arguments: ConvertArguments, config: PreTrainedConfig) -> str:
    """Choose the preset where none is named: hybrid where something else says what is trained, or how."""
    given = ("patch", "stages", "transfer_tokens", "distill_tokens", "teacher", "cache_teacher")
    if any(getattr(arguments, name) is not None for name in given) or arguments.learn_front:
        return HYBRID
    if hasattr(config, NAME) or arguments.data == SELF or _learns_states(arguments, config):
        return HYBRID
    if choose_objective(arguments.objective, config) != "causal":
        return HYBRID
    return default_preset(count_parameters(config))


def _check_can_choose(
    asked: str, arguments: ConvertArguments, config: PreTrainedConfig, objective: Objective
) -> None:
    """See that layers of a model can be chosen, before anything is trained.

    Raises:
        OptionError: it is patched, it is none that continues text, or has no more layers than --keep; or the
            other options leave nothing to choose by.
    """
    transfers = [name == "transfer" for name in arguments.chosen_stages()]
    untrained = arguments.chosen_preset.shares["transfer"] > 0 and not any(transfers)
    refused = {
        "ranks what stage transfer has trained, and trains the choice: run it and a stage behind it": (
            untrained or all(transfers)
        ),
        "chooses layers itself: give --patch one name for all": isinstance(arguments.patch, dict),
        "puts the original's layers back: leave out --train-projections": arguments.train_projections,
    }
    for why, refuse in refused.items():
        if refuse:
            raise OptionError(f"{asked} {why}")
    if hasattr(config, NAME):
        raise OptionError(f"{asked} begins with an unpatched model, and --model {arguments.model} is patched")
    if objective.name != "causal":
        raise OptionError(f"{asked} asks causal models what they recall: take --preset hybrid for others")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(arguments.keep, int) and layers is not None and arguments.keep >= layers:
        raise OptionError(f"--keep {arguments.keep}: the model has {layers} layers, and some become linear")


def resolve_patch(arguments: ConvertArguments, config: PreTrainedConfig) -> ConvertArguments:
    """Spell the patch out: the preset's where none is named, with --learn-front a layer in front of its map.

    A patched model, as its config tells, keeps what it has.

    Raises:
        OptionError: a new patch for a patched model, a preset for causal models and an encoder, or a learned
            layer in front of what takes none.
    """
    if hasattr(config, NAME):
        if arguments.patch is not None or arguments.learn_front or arguments.options:
            raise OptionError(
                f"--model {arguments.model} is patched already, and its patch is what is trained: leave out "
                "--patch, --options and --learn-front, or give the unpatched model"
            )
        return arguments
    patch, options = arguments.patch, arguments.options
    if patch is None:
        preset = arguments.chosen_preset
        encoder = choose_objective("auto", config) == "mlm"  # a state that forgets has one direction
        if encoder and not preset.encoders:
            raise OptionError(
                f"--preset {arguments.preset} is for causal models, and --model {arguments.model} is an "
                "encoder: leave --preset out"
            )
        patch = default_patch("conversion") if preset.patch is None or encoder else preset.patch
        sizes = [given["size"] for given in parse(patch, options).options.values() if "size" in given]
        chosen = {} if encoder else preset.options_for(config, *sizes[:1])
        options = merge_options(patch, chosen, options) or None
    elif isinstance(patch, str):
        parse(patch, options)  # a wrong name is refused before a text is read
    if not arguments.learn_front:
        return replace(arguments, patch=patch, options=options)
    if isinstance(patch, str):
        patch, front = with_learned_front(patch)
        return replace(arguments, patch=patch, options=merge_options(patch, front, options))
    layers = {}
    for key, entry in patch.items():
        spec, own = entry if isinstance(entry, list | tuple) else (entry, {})
        spec, front = (spec, {}) if parse(spec).identity else with_learned_front(spec)
        layers[key] = [spec, {**front, **own}]
    return replace(arguments, patch=layers)


def with_learned_front(spec: str) -> tuple[str, dict[str, Any]]:
    """Put a learned layer in front of a composition's feature map; returns it with the options that say so.

    >>> with_learned_front("window+elu1")
    ('window+linear', {'linear': {'feature_map': 'elu1', 'front': True}})
    >>> with_learned_front("gated")
    ('gated', {'gated': {'front': True}})

    Raises:
        OptionError: it holds no feature map.
    """
    names = names_in(spec)
    maps = [
        name for name in names if issubclass(find(name), LinearAttention) or "front" in signature(find(name))
    ]
    if len(maps) != 1:
        raise OptionError(f"--learn-front: {spec!r} has no feature map that a layer could stand in front of")
    if "front" in signature(find(maps[0])):
        composed = spec
        options: dict[str, Any] = {maps[0]: {"front": True}}
    else:
        wrapper = default_patch("learned front")
        composed = "+".join(wrapper if name in maps else name for name in names)
        options = {wrapper: {"feature_map": maps[0], "front": True}}
    parse(composed, options)
    return composed, options


def _resolve_objective(
    arguments: ConvertArguments,
    stages: Sequence[str],
    config: PreTrainedConfig,
    original: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Objective:
    """What the model learns, by what the original was saved with: a head that predicts tokens, or none.

    Raises:
        TrainingError: it cannot do what is asked: predict without a head, or write text.
    """
    name = arguments.teacher or arguments.model
    if _learns_states(arguments, original):
        refused = {
            "--data self": SELF in (arguments.data, arguments.eval_data),
            "stage finetune (--stages distill leaves it out)": "finetune" in stages,
            "--ce-weight": bool(arguments.ce_weight),
        }
        for what, asked in refused.items():
            if asked:
                raise TrainingError(f"{name} gives hidden states and predicts no text, so there is no {what}")
        return build_states_objective(original, tokenizer, arguments.block_size)
    chosen = choose_objective(arguments.objective, config)
    objective = build_objective(chosen, tokenizer, arguments.block_size, arguments.seed)
    if chosen == "mlm" and SELF in (arguments.data, arguments.eval_data):
        raise TrainingError(f"{name} predicts masked tokens and writes no text: give --data a text of yours")
    if chosen == "mlm" and _headless(original):
        raise TrainingError(
            f"{name} was saved as {(original.architectures or [''])[0]}, without a head that predicts masked "
            "tokens: leave --objective out, and it learns the hidden states, or give it a head with "
            "hf_linattn.finetune --objective mlm"
        )
    return objective


def _learns_states(arguments: ConvertArguments, original: PreTrainedConfig) -> bool:
    return arguments.objective == "states" or (arguments.objective == "auto" and _headless(original))


def _check_cacheable(objective: Objective, stages: Sequence[str]) -> None:
    """See that stage distill compares predictions of rows that stay the same.

    Raises:
        OptionError: it does not, or there is no such stage.
    """
    reasons = {
        "mlm": "masked tokens are other ones in every step, and so are the predictions",
        "states": "hidden states are compared, not predictions",
    }
    reason = reasons.get(objective.name) if "distill" in stages else "there is no stage distill"
    if reason is not None:
        raise OptionError(f"--cache-teacher: {reason}; leave it out")


def _headless(config: PreTrainedConfig) -> bool:
    """Whether a model was saved without a head that predicts tokens, bare or with another one."""
    saved, bare = (config.architectures or [""])[0], MODEL_MAPPING_NAMES.get(config.model_type, "")
    if not saved or saved in ((bare,) if isinstance(bare, str) else bare):
        return bool(saved)
    head = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    return choose_objective("auto", config) == "mlm" and saved != head


def _with_rows_of(
    objective: Objective, length: int, arguments: ConvertArguments, tokenizer: PreTrainedTokenizerBase
) -> Objective:
    """The same objective in rows of so many tokens."""
    if length == arguments.block_size:  # also all that compares hidden states: it has no stage finetune
        return objective
    return build_objective(objective.name, tokenizer, length, arguments.seed)
