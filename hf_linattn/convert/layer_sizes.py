"""Preset `h2o`: how many tokens each layer keeps follows from what the model loses by the layer alone.

Some layers look far back and others do not. All together keep as many tokens as with the same size in each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig

from hf_linattn import bypassed, describe, patch_model
from hf_linattn.cli.files import read_json, write_json, writing
from hf_linattn.convert.outputs import SIZES
from hf_linattn.convert.presets import context_of
from hf_linattn.convert.resolve import ConversionPlan
from hf_linattn.convert.stages import first_tokens, load_original
from hf_linattn.errors import TrainingError
from hf_linattn.patching.reuse import reusing_layers
from hf_linattn.registry import parse
from hf_linattn.training.divergence import ComparisonTarget

TOKENS = 8192
"""Tokens of the text that each layer is measured on, at most; at least a row."""
PART = 100
"""Of the tokens to train on, what they are a part of at most: it takes a tenth of the training's time."""
WINDOWS = 8
"""Sizes of the window in a row of text. The first two do not count: there is little to choose from."""
STEP = 16
"""Sizes are multiples of it: blocks of an eighth are whole."""
LEAST = 0.375
"""Of the size that all would have: the least of a layer."""
POWER = 0.6
"""Of losses, to which sizes are in proportion; measured on SmolLM2 (docs/smollm2.md)."""


def size_layers(plan: ConversionPlan, accelerator: Accelerator, data: Any = None) -> dict[str, Any]:
    """Measure what each layer alone loses, once, and share the tokens that are kept among the layers.

    A call of all processes: the first works, the others wait.

    Args:
        plan: of the conversion, whose patch has an option `size`.
        accelerator: of this process.
        data: text as `load_documents` takes it, in the place of --data.

    Returns:
        "sizes", of each attention module by its name, and "losses", KL(original || patched there) in nats per
        token, both empty where the text is too short to tell; "of", what was measured.

    Raises:
        DataError: the text cannot be read.
        TrainingError: there is no such model, or it computes NaN.
    """
    path, arguments = plan.folder.path / SIZES, plan.arguments
    of = {"model": plan.original, "patch": arguments.patch, "options": arguments.options}
    if accelerator.is_main_process and not (path.exists() and read_json(path).get("of") == of):
        found = {"of": of, **_measured(plan, accelerator, data)}
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found)
    accelerator.wait_for_everyone()
    return read_json(path)


def with_sizes(plan: ConversionPlan, sizes: Mapping[str, int]) -> ConversionPlan:
    """Return a plan whose layers keep so many tokens; tokens beside the window in proportion to it."""
    if not sizes:
        return plan
    patch, options = _spelled_out(plan)
    heavy, size = options["heavy"], options["size"]
    layers = {
        name: [patch, {**options, "size": own, "heavy": max(1, round(heavy * own / size))}]
        for name, own in sizes.items()
    }
    return replace(plan, layers=layers)


def share(losses: Mapping[str, float], size: int) -> dict[str, int]:
    """Share sizes among layers, by what each alone loses, all together at most `size` in each.

    >>> share({"0": 0.001, "1": 0.001, "2": 0.016}, 128)
    {'0': 48, '1': 48, '2': 288}
    """
    least = max(STEP, int(size * LEAST) // STEP * STEP)
    weights = {name: max(loss, 0.0) ** POWER for name, loss in losses.items()}
    if size < STEP or not sum(weights.values()) > 0:
        return dict.fromkeys(losses, size)

    def sizes(factor: float) -> dict[str, int]:
        return {name: max(least, int(factor * x) // STEP * STEP) for name, x in weights.items()}

    low, high = 0.0, 2.0 * size * len(losses) / min(x for x in weights.values() if x > 0)
    for _ in range(100):
        middle = (low + high) / 2
        if sum(sizes(middle).values()) > size * len(losses):
            high = middle
        else:
            low = middle
    return sizes(low)


def row_length(size: int, config: PreTrainedConfig) -> int:
    """Count the tokens of a row of text in which windows of a size show what they lose."""
    return min(WINDOWS * size, context_of(config) or TOKENS)


@torch.no_grad()
def layer_losses(
    model: Any, rows: Sequence[Tensor], comparison: ComparisonTarget, first: int
) -> dict[str, float]:
    """Compare a patched model with itself unpatched, patched in one attention module at a time.

    Args:
        model: patched.
        rows: of text, `[1, N]` each, at least one.
        comparison: of predictions.
        first: position of the first prediction that counts.

    Returns:
        Name of the module -> KL(unpatched || patched there) in nats per token.
    """
    names = [row.module for row in describe(model) if row.patch != "softmax"]
    losses = dict.fromkeys(names, 0.0)
    steps = tqdm(total=len(rows) * len(names), desc="what each layer loses", unit="layer", file=sys.stderr)
    for ids in rows:
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        chosen[:, first:] = True
        with reusing_layers(model):
            with bypassed(model):
                teacher = comparison.run(model, ids)
            for name in names:
                with bypassed(model, [other for other in names if other != name]):
                    losses[name] += float(comparison.divergence(comparison.run(model, ids), teacher, chosen))
                steps.update()
    steps.close()
    return {name: loss / len(rows) for name, loss in losses.items()}


def _spelled_out(plan: ConversionPlan) -> tuple[str, dict[str, Any]]:
    """Return the patch of the plan and its own options."""
    patch = plan.arguments.patch
    assert isinstance(patch, str)
    return patch, parse(patch, plan.arguments.options).options[patch]


def _measured(plan: ConversionPlan, accelerator: Accelerator, data: Any) -> dict[str, Any]:
    arguments, (patch, options) = plan.arguments, _spelled_out(plan)
    size = options["size"]
    ids = first_tokens(plan, TOKENS, data)
    model = load_original(plan.original, arguments.dtype, plan.objective).to(accelerator.device)
    length = min(row_length(size, model.config), len(ids))
    if length <= 2 * size:
        return {"sizes": {}, "losses": {}}
    trained = sum(stage.tokens for stage in plan.stages)
    count = max(1, min(TOKENS, trained // PART, len(ids)) // length)
    rows = ids[: count * length].view(-1, 1, length)
    patch_model(model, patch, options=arguments.options, sliding=arguments.sliding)
    losses = layer_losses(model, [*rows.to(accelerator.device)], plan.objective.comparison, 2 * size)
    if not all(map(math.isfinite, losses.values())):  # a later --resume would take the sizes as measured
        raise TrainingError(
            f"what layers of {plan.original} lose is no number: its weights hold NaN or Inf, or a sum "
            "overflows (in 16 bits, try --dtype float32)"
        )
    return {"sizes": share(losses, size), "losses": losses}
