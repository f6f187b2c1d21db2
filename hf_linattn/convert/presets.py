"""Presets of a conversion: patch, recipe and shares of the stages, wherever the user gives none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from hf_linattn.errors import OptionError
from hf_linattn.registry import parse, patches

STAGES = ("transfer", "distill", "finetune")
AUTO = "auto"
"""In the place of a preset: what is best for a model of this size."""
RECALL = "recall"
"""The same, with softmax in a quarter of the layers."""
NAMED = (AUTO, RECALL)
"""What stands for a preset until the model is known."""
QUARTER = "quarter"
"""Of all layers, as a number of those that stay softmax."""
SMALL = 100_000_000
"""Parameters; below, hybrids of a recipe that was measured train all weights, above LoRA."""

PLAIN: Mapping[str, Any] = MappingProxyType(
    {
        "batch_size": 8,
        "adam_beta2": 0.95,
        "patch_rate": 1.0,
        "ce_weight": 0.0,
        "eval_every": 50,
        "drop_window": 0.0,
    }
)
"""The options' own defaults."""

SMALL_STEPS: Mapping[str, Any] = MappingProxyType(
    {
        "batch_size": 2,
        "adam_beta2": 0.999,
        "patch_rate": 10.0,
        "ce_weight": 1.0,
        "eval_every": 200,
        "drop_window": 0.1,
    }
)
"""What is best in docs/results.md: steps of few rows that learn from the teacher and from the text, some
without the window of hybrids."""

FORMER = {
    "quick": "--preset plain",
    "full": "--preset plain --transfer-tokens 10000000 --distill-tokens 60000000 --finetune-tokens 10000000 "
    "--finetune-length 2048",
    "lora": "--preset plain --transfer-tokens 5000000 --distill-tokens 15000000 --lora 16",
}
"""Presets of earlier versions, and what is the same now."""


@dataclass(frozen=True)
class Preset:
    """What a conversion does where nothing else is said.

    Attributes:
        shares: of --tokens that the stages get.
        recipe: values of options.
        patch: None for the patch that is the default of conversions.
        options: of the patch.
        sizes_layers: whether layers keep as many tokens as they need, as measured.
        encoders: whether it converts them too, with the patch that is the default of conversions.
    """

    shares: Mapping[str, float]
    recipe: Mapping[str, Any]
    patch: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes_layers: bool = False
    encoders: bool = True

    def options_for(self, config: PreTrainedConfig, size: int | None = None) -> dict[str, Any]:
        """Return the patch's options for a model.

        A window is a thirty-second of the context, 64 to 256 tokens: then it and the state take a twentieth
        of what a full context of softmax does (docs/smollm2.md). It is a sixteenth shorter where half as many
        tokens are kept beside it, for the same share.

        Args:
            config: of the model.
            size: of the window, where it is given.
        """
        options = dict(self.options)
        context = context_of(config)
        if "size" in options and context is not None:
            part, most = (34, 240) if "heavy" in options else (32, 256)
            options["size"] = min(max(context // part, options["size"]), most)
        if size is not None:
            options["size"] = size
        if "heavy" in options:
            options["heavy"] = max(options["size"] // 2, 1)
        return options

    def tokens(self, stage: str, total: int, named: list[str] | None) -> int:
        """Give a stage its share of the tokens of all; a named stage without one counts as the longest.

        Args:
            stage: the stage.
            total: tokens of all stages together.
            named: the stages that share them; None for all that have a share.
        """
        if named is None:
            return round(total * self.shares[stage])
        shares = {name: self.shares[name] or max(self.shares.values()) for name in named}
        return round(total * shares.get(stage, 0) / sum(shares.values()))


_HYBRID: dict[str, Any] = {
    "shares": {"transfer": 0.1, "distill": 0.9, "finetune": 0.0},
    "recipe": SMALL_STEPS,
    "patch": "window+gated",
    # heads of the state begin where the window ends
    "options": {"size": 64, "sinks": 4, "feature_map": "hedgehog", "shortest": 64, "half_life": 1024},
}
_LINEAR = {"feature_map": "taylor2", "front": True, "shortest": 4, "half_life": 256, "source": "hidden"}

PRESETS = {
    "hybrid": Preset(**_HYBRID),
    "linear": Preset(**{**_HYBRID, "patch": "gated", "options": _LINEAR}),
    "h2o": Preset(
        # just put in it says what the model said: what is left to learn is the text
        {"transfer": 0.0, "distill": 0.0, "finetune": 1.0},
        SMALL_STEPS,
        "h2o",
        {"size": 64, "heavy": 32, "sinks": 4},
        sizes_layers=True,
        encoders=False,
    ),
    "plain": Preset({"transfer": 0.2, "distill": 0.8, "finetune": 0.0}, PLAIN),
}


def context_of(config: PreTrainedConfig) -> int | None:
    """Return how many tokens of context a model has; None where its config does not say."""
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context


def find_preset(name: str) -> Preset:
    """Find a preset by its name.

    Raises:
        OptionError: there is none, or none any more.
    """
    if name in NAMED:  # until it is known which
        name = "hybrid"
    if name in FORMER:
        raise OptionError(
            f"--preset {name} is gone: leave it out for the best recipe, with --tokens for how much of it; "
            f"what it did is now {FORMER[name]}"
        )
    if name not in PRESETS:
        raise OptionError(f"--preset must be one of {', '.join((*NAMED, *PRESETS))}, not {name!r}")
    return PRESETS[name]


def default_preset(parameters: int) -> str:
    """Name the preset that is best for a causal model of so many parameters.

    Small ones have few tokens of far back that are worth keeping, and their hybrids are nearer to the control
    (docs/results.md); in larger ones states are worth little (docs/smollm2.md).

    >>> default_preset(135_000_000)
    'h2o'
    """
    return "hybrid" if parameters < SMALL else "h2o"


def default_patch(purpose: str) -> str:
    """Name the patch that declares itself `default_for` a purpose.

    >>> default_patch("conversion")
    'hedgehog'
    """
    # own attributes: a patch derived from another is not the default with it
    return next(name for name, cls in patches().items() if vars(cls).get("default_for") == purpose)


def merge_options(
    patch: str, options: Mapping[str, Any], stronger: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Merge two sets of options of a patch by part; those that are `stronger` win.

    >>> merge_options("window+gated", {"size": 64, "shortest": 4}, {"window": {"size": 8, "sinks": 1}})
    {'window': {'size': 8, 'sinks': 1}, 'gated': {'shortest': 4}}

    Raises:
        OptionError: one that no part has.
    """
    parts = {name: dict(values) for name, values in parse(patch, dict(options)).options.items()}
    for name, values in parse(patch, dict(stronger or {})).options.items():
        parts[name] = {**parts.get(name, {}), **values}
    return parts
