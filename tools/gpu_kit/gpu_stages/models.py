"""Stage `models`: random Llamas of 135 M and 1 B: prefill, one decoded token, a training step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_linattn import patch_model
from hf_linattn.eval.bench.candidates import put_back
from hf_linattn.patching.cache_layers import cache_argument

from . import timing
from .work import Case, Context, Row, kernels

SIZES: dict[str, dict[str, int]] = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 50304,
    },
}
"""Of SmolLM2-135M, heads of 64; and with heads of 128."""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
LENGTHS = (1024, 8192, 32768)
KINDS = ("prefill", "decode", "train")
FORMS = (
    ("softmax", ""),
    ("elu1", "1"),
    ("window+gated", "1"),
    ("h2o", "1"),
    ("elu1", "0"),
    ("window+gated", "0"),
    ("window", "1"),
    ("gated", "1"),
    ("hedgehog", "1"),
    ("window+elu1", "1"),
    ("window+elu1", "0"),
)
"""Patch, and whether kernels are insisted on or off."""
CHECKPOINTED = 8192
"""Tokens from which on training computes activations again in the backward."""
MAIN, SECOND = 3, 6
"""Forms whose rows come first, of every size; and those that come second, of the small one."""
HELD = 3
"""Models that stay on the device."""
_held: dict[tuple[str, str], Any] = {}


def cases(context: Context) -> list[Case]:
    """List the main forms of the small model by length, what they are beside, the large one, the rest."""
    if context.dry:
        return _cases(context, "tiny", (("softmax", ""), ("elu1", "0"), ("h2o", "")), (16,))
    small, large = SIZES
    found = _cases(context, small, FORMS[:MAIN], LENGTHS)
    for form in FORMS[MAIN:SECOND]:
        found += _cases(context, small, (form,), LENGTHS)
    found += _cases(context, large, FORMS[:MAIN], LENGTHS)
    for form in FORMS[SECOND:]:
        found += _cases(context, small, (form,), LENGTHS)
    for form in FORMS[MAIN:]:
        found += _cases(context, large, (form,), LENGTHS)
    return found


def _cases(
    context: Context, name: str, forms: tuple[tuple[str, str], ...], lengths: tuple[int, ...]
) -> list[Case]:
    """List these forms of a model at one length after the other."""
    found = []
    for length in lengths:
        for patch, wish in forms:
            for kind in KINDS:
                how = {"1": "on", "0": "off", "": "none"}[wish]
                case = {"model": name, "patch": patch, "kernels": how, "kind": kind, "length": length}
                found.append(Case(case, partial(_row, context, name, patch, wish, kind, length)))
    return found


def _model(context: Context, name: str, patch: str) -> Any:
    """Make a model, or find it among the last ones of its size."""
    if (name, patch) not in _held:
        for key in list(_held):
            if key[0] != name or len(_held) >= HELD:
                del _held[key]
        torch.manual_seed(0)
        sizes = TINY if name == "tiny" else SIZES[name]
        config = LlamaConfig(**sizes, max_position_embeddings=2**17, attn_implementation="sdpa")
        with torch.device(context.device):
            model: Any = LlamaForCausalLM(config)
        if patch != "softmax":
            patch_model(model, patch)
        _held[name, patch] = model.to(context.device, context.dtype)
    return _held[name, patch]


def _row(context: Context, name: str, patch: str, wish: str, kind: str, length: int) -> Row:
    model = _model(context, name, patch)
    ids = torch.randint(3, model.config.vocab_size, (1, length), device=context.device)
    with kernels(wish):
        call = {"prefill": _prefill, "decode": _decode, "train": _train}[kind](model, ids)
        try:
            row: Row = {}
            if kind == "decode":
                with torch.no_grad():
                    row = timing.both(call, context.device)
            else:
                row["ms"], row["ms_least"] = timing.milliseconds(call, context.device)
            row["tokens_per_second"] = (1 if kind == "decode" else length) / row["ms"] * 1000
            return row | timing.busy(call, context.device) | timing.peak(call, context.device)
        finally:
            if kind == "train":
                _checkpointing(model, False)
            model.zero_grad(set_to_none=True)
            model.eval()


def _prefill(model: Any, ids: torch.Tensor) -> Any:
    name = cache_argument(model)  # not in the call, which is timed

    @torch.no_grad()
    def call() -> None:
        model(ids, **{name: DynamicCache(config=model.config)}, use_cache=True, logits_to_keep=1)

    model.eval()
    return call


@torch.no_grad()
def _decode(model: Any, ids: torch.Tensor) -> Any:
    """Make one token behind a cache, which is put back after it."""
    model.eval()
    cache = DynamicCache(config=model.config)
    given: Any = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    model(ids, **given)
    references, _ = put_back(cache)

    @torch.no_grad()
    def call() -> None:
        model(ids[:, :1], **given)
        references()

    return call


def _checkpointing(model: Any, on: bool) -> None:
    """Compute activations again in the backward, or not; transformers has renamed it."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_{'enable' if on else 'disable'}")()


def _train(model: Any, ids: torch.Tensor) -> Any:
    """Make a step of AdamW."""
    model.train()
    _checkpointing(model, ids.shape[1] >= CHECKPOINTED or not ids.is_cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ids.is_cuda)

    def call() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return call
