"""Stage `patches`: a small Llama with every patch, against the same model in float64 on the CPU.

What is compared is what users run: a padded batch forward and backward, and a prompt followed by tokens from
the cache. Kernels that fail the package's own check on the way are a failure of the case.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn import available_patches, patch_model
from hf_linattn.errors import LinattnError
from hf_linattn.patching.cache_layers import cache_argument, output_cache

from .correct import error
from .work import Case, Context, Row, Skip, kernels

WINDOW = {"size": 32, "sinks": 4}
COMPOSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("window", WINDOW),
    ("window+elu1", WINDOW),
    ("window+gated", {**WINDOW, "feature_map": "hedgehog"}),
    ("window+delta", {**WINDOW, "feature_map": "hedgehog"}),
    ("window+hedgehog", WINDOW),
    ("window+decay", WINDOW),
    ("delta", {"feature_map": "taylor2", "front": True, "conv": 4}),
    ("softmax1+logn", {}),
    ("gated+output_norm", {}),
)
CHOICES = ("lsh", "topk", "power", "entmax15", "unscaled")
"""Which keys count is a choice that rounding to bfloat16 makes anew; with large scores almost one."""
ALLOWED = {"float32": 5e-5, "bfloat16": 0.12}
"""Relative error of logits, which another patch moves by 0.2 to 1.3; three times as much for the gradient."""
LENGTH, PADDING, TOKENS = 150, 9, 4


def cases(context: Context) -> list[Case]:
    """List patches as they are, then with options and composed."""
    names: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in available_patches()]
    names += COMPOSED
    if context.dry:
        names = [("elu1", {}), ("window+gated", {**WINDOW, "size": 5})]
    return [
        Case({"patch": patch, "dtype": dtype, **options}, partial(_row, context, patch, options, dtype))
        for patch, options in names
        for dtype in (("float32",) if context.dry or patch in CHOICES else ("bfloat16", "float32"))
    ]


def _model(patch: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 97}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, initializer_range=0.08)  # so that attention moves the logits
    model = LlamaForCausalLM(config).eval()
    try:
        return patch_model(
            model, patch, options={"train_length": 64, **options} if "logn" in patch else options
        )
    except LinattnError as error:
        raise Skip(str(error)) from error  # of encoders only, say


def _row(context: Context, patch: str, options: dict[str, Any], dtype: str) -> Row:
    model = _model(patch, options)
    length = 20 if context.dry else LENGTH
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(1))
    with kernels("0"):
        want = _run(copy.deepcopy(model).double(), ids)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = _run(model.to(context.device, getattr(torch, dtype)), ids.to(context.device))
    refused = [str(each.message) for each in said if "kernels" in str(each.message)]
    errors = {name: error(got[name].cpu(), want[name]) for name in want}
    allowed = ALLOWED[dtype]
    bad = [name for name, x in errors.items() if not x <= allowed * (3 if name == "gradient" else 1)]
    row: Row = {"errors": errors, "worst": max(errors.values()), "allowed": allowed}
    if refused:  # what computed instead is right, but not what was to be tried
        row["error"] = refused[0][:400]
    if bad:
        row["error"] = ", ".join(f"{name} is {errors[name]:.2e} away from float64" for name in bad)
    return row


def _run(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return logits and gradient of a padded batch, and logits of tokens decoded one by one."""
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    seen = logits[mask.bool()]
    weight = torch.linspace(-1, 1, seen.numel(), dtype=torch.float64).view_as(seen).to(seen)
    (gradient,) = torch.autograd.grad((seen * weight).sum() / len(seen), model.get_input_embeddings().weight)
    found = {"logits": seen.detach(), "gradient": gradient}
    with torch.no_grad():
        prompt = ids.shape[1] - TOKENS
        out = model(ids[:, :prompt], attention_mask=mask[:, :prompt], use_cache=True)
        steps = [out.logits[:, -1:]]
        for place in range(prompt, ids.shape[1]):
            out = model(
                ids[:, place : place + 1],
                attention_mask=mask[:, : place + 1],
                **{cache_argument(model): output_cache(out)},
                use_cache=True,
            )
            steps.append(out.logits)
        found["decoded"] = torch.cat(steps, dim=1)
    return found
