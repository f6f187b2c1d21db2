"""One model against the oracle: each patch, with and without a cache, and taken off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from helpers.family_configs import LENGTH, first_line
from helpers.family_models import NotBuilt, Slow, cast, causal_inputs, causal_model, main_output
from helpers.oracle import as_oracle
from helpers.properties import learned
from hf_linattn import LinattnError, patch_model, unpatch_model
from hf_linattn.attention import AttentionSite
from hf_linattn.errors import UnsupportedMaskError
from hf_linattn.patching.discovery import find_sites

HYBRID = "window+gated"
PATCHES = ("elu1", "softmax1", "logn", HYBRID)
OPTIONS: dict[str, dict[str, Any]] = {HYBRID: {"size": 16, "sinks": 3, "positions": "text"}}
LINEAR = ("elu1", HYBRID)  # drop the model's windows
CUTS = (0, 40, 41, LENGTH)  # borders of the calls with a cache
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
CACHE_TOLERANCE = 1e-4  # many families compute norms in float32, and chunks round them differently


@dataclass
class Result:
    """What was found for one type; errors are differences of logits relative to max(1, largest logit).

    Attributes:
        status: right, refused, wrong, not routed, not built.
        dtype: of the model; patches, cache: patch -> error, or the reason of a refusal or failure.
        sliding: patch -> what patch_model was told about windows.
        own_cache: the unpatched model's error with a cache.
        own: error of the oracle's softmax against the model's own attention.
        modules: attention modules that ran through the interface, and all that can.
        untouched: attention classes beside them that do not route.
        adapted: an adapter makes its attention route.
    """

    name: str
    status: str = "not built"
    reason: str = ""
    dtype: str = ""
    patches: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    sliding: dict[str, str] = field(default_factory=dict)
    own_cache: Any = None
    own: float | None = None
    modules: tuple[int, int] = (0, 0)
    untouched: list[str] = field(default_factory=list)
    adapted: bool = False


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to max(1, largest value wanted); NaN stays NaN."""
    return float((got - want).abs().max() / want.abs().max().clamp_min(1))


def in_chunks(model: nn.Module, inputs: dict[str, Tensor], cuts: tuple[int, ...]) -> Tensor | None:
    """Logits of the same rows, call by call through a cache; None if the model returns no cache."""
    ids, mask, cache, outputs = inputs["input_ids"], inputs["attention_mask"], None, []
    batch = mask.shape[0]
    for start, end in pairwise(cuts):
        output = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:batch, :end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        outputs.append(output.logits)
    return torch.cat(outputs, 1)


def with_cache(model: nn.Module, inputs: dict[str, Any], pick: Callable[[Tensor], Tensor]) -> Any:
    """Logits in chunks through a cache, or what was raised."""
    try:
        output = in_chunks(model, inputs, CUTS)
        return "no cache in the output" if output is None else pick(output)
    except Slow:
        raise
    except Exception as problem:
        return first_line(problem)


def cache_error(got: Any, whole: Tensor, oracle: Callable[[], Any]) -> Any:
    """Error of chunks against the whole at once.

    Where a model does not agree with itself there (many recurrent layers do not continue a padded chunk),
    against the oracle in the same chunks.
    """
    if isinstance(got, str):
        return got
    error = relative(got, whole)
    if error < CACHE_TOLERANCE:
        return error
    want = oracle()
    return error if isinstance(want, str) else min(error, relative(got, want), key=lambda x: (x != x, x))


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What unpatching must bring back beside the logits: keys, config, hooks, children."""
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    names = [name for name, _ in model.named_modules()]
    attributes = [sorted(m.__dict__) for m in model.modules()]
    return list(model.state_dict()), model.config.to_dict(), hooks, names, attributes


def untouched(model: nn.Module) -> list[str]:
    """Classes of attention that do not route: no site is above or below them."""
    sites = [site.name for site in find_sites(model)]
    found = set()
    for name, module in model.named_modules():
        related = any(f"{site}.".startswith(f"{name}.") or name.startswith(f"{site}.") for site in sites)
        if not related and name and "Attention" in type(module).__name__:
            found.add(type(module).__name__)
    return sorted(found)


def plan_of(patch: str, sites: list[AttentionSite]) -> dict[str, Any]:
    """Name the modules that a patch is for: one that forgets has one direction."""
    fit = [site for site in sites if patch != HYBRID or site.causal is not False]
    return {site.name: (patch, OPTIONS.get(patch, {})) for site in fit}


@torch.no_grad()
def check(
    name: str,
    model: nn.Module,
    inputs: dict[str, Any],
    patches: tuple[str, ...] = PATCHES,
    cached: bool = True,
) -> Result:
    """Compare every patch with the oracle, on the positions that are not padded."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    tolerance = TOLERANCE[dtype]
    result = Result(name, dtype=str(dtype).removeprefix("torch."))
    inputs = cast(inputs, dtype)
    text = "input_ids" in inputs
    whole = {**inputs, "use_cache": False} if text else inputs
    live = inputs.get("attention_mask")

    def pick(output: Tensor) -> Tensor:
        fits = live is not None and output.dim() == 3 and output.shape[:2] == live.shape
        return output[live.bool()] if fits else output

    def run() -> Tensor:
        return main_output(model(**whole))

    base = run()
    sites = find_sites(model)
    result.untouched = untouched(model)
    result.adapted = any(site.adapted for site in sites)
    if not sites:
        try:
            patch_model(model, patches[0])
        except LinattnError as error:
            result.status, result.reason = "not routed", first_line(error, 400)
        return result
    with as_oracle(model, "softmax") as seen:
        finite = pick(base).isfinite()  # eager attention makes NaN of padded rows in float64
        result.own = relative(pick(run())[finite], pick(base)[finite])
    result.modules = (len({id(module) for module in seen.calls}), len(sites))
    if not seen.calls:
        result.status, result.reason = (
            "not routed",
            "the text runs through none of its attention modules that route",
        )
        return result
    before = fingerprint(model)
    problems = [] if result.own < 1e-4 else [f"the oracle's softmax is off by {result.own:.1e}"]
    for patch in patches:
        sliding = "global" if patch in LINEAR else "keep"
        plan = plan_of(patch, sites)
        if not plan:
            continue
        try:
            patch_model(model, plan, sliding=sliding)
        except LinattnError as error:
            result.patches[patch] = first_line(error, 400)
            if fingerprint(model) != before:
                problems.append(f"{patch}: the refusal left traces")
            continue
        try:
            try:
                got = pick(run())
            except UnsupportedMaskError:
                if sliding == "keep":
                    raise
                sliding = "keep"  # windows in a mask that the model makes itself cannot be dropped
                patch_model(model, plan, sliding=sliding)
                got = pick(run())
            weights = learned(model)
            chunks = with_cache(model, inputs, pick) if cached and text else None
        except LinattnError as error:
            result.patches[patch] = "at the first call: " + first_line(error, 400)
            continue
        except Slow:
            raise
        except Exception as error:
            problems.append(f"{patch}, call: {first_line(error)}")
            continue
        finally:
            unpatch_model(model)
        result.sliding[patch] = sliding
        extra = {"learned": weights, "where": weights.__contains__, "windows": sliding == "keep"}
        with as_oracle(model, patch, **extra, **OPTIONS.get(patch, {})):
            want = pick(run())
            if chunks is not None:
                result.cache[patch] = cache_error(chunks, got, lambda: with_cache(model, inputs, pick))
        result.patches[patch] = error = relative(got, want)
        if not error <= tolerance:
            problems.append(f"{patch} differs by {error:.1e}")
        if float((got - pick(base)).abs().max()) < 1e-6:
            problems.append(f"{patch} changed nothing")
    after = run()
    if not torch.equal(after.nan_to_num(7e7), base.nan_to_num(7e7)) or fingerprint(model) != before:
        problems.append("unpatching is not exact")
    if cached and text:
        result.own_cache = cache_error(with_cache(model, inputs, pick), pick(after), lambda: "")
        for patch, error in result.cache.items():
            if not _good(error) and _good(result.own_cache):
                problems.append(f"{patch} with a cache: {error}")
    refused = [patch for patch, value in result.patches.items() if isinstance(value, str)]
    result.status = "wrong" if problems else "refused" if refused else "right"
    result.reason = "; ".join(problems)
    return result


def _good(error: Any) -> bool:
    return isinstance(error, float) and error < CACHE_TOLERANCE


def check_causal(name: str, patches: tuple[str, ...] = PATCHES, cached: bool = True) -> Result:
    """Build and check one causal type."""
    try:
        model = causal_model(name)
    except NotBuilt as error:
        return Result(name, reason=str(error))
    return check(name, model, causal_inputs(name), patches, cached)
