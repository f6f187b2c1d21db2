"""Nats per token: a model over windows, or over a document read in segments through its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.errors import DataError, LinattnError, UnsupportedModelError
from hf_linattn.parallel import Shard, row_part
from hf_linattn.patching.cache_layers import cache_argument, output_cache

from .formatting import NOT_FINITE
from .windows import Texts, Window

LOSS_CHUNK = 1024
"""Positions whose logits are raised to float32 at a time."""


@contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Switch gradients and dropout off; the training mode of every module comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    _reset_dynamic_rope(model)
    try:
        # not inference_mode: RoPE may register buffers here, which a later training could not use
        with torch.no_grad():
            yield
    finally:
        _reset_dynamic_rope(model)
        for module, mode in modes:
            module.training = mode


def window_logits(model: nn.Module, texts: Texts, windows: list[Window]) -> tuple[Tensor, Tensor]:
    """Compute logits `[windows, scored, V]` and the tokens `[windows, scored]` that they predict."""
    ids, scored = _window_ids(model, texts, windows), windows[0].scored
    # logits belong to the token after theirs: one position more, and the last one is nobody's
    logits = forward(model, ids, scored + 1, use_cache=False).logits[:, -scored - 1 : -1]
    return logits, ids[:, -scored:]


def window_nats(model: nn.Module, texts: Texts, windows: list[Window]) -> Tensor:
    """Compute nats `[windows, scored]` in float32; all windows have one length."""
    # imported here: --help of a command loads nothing of training
    from hf_linattn.training.divergence import cross_entropy
    from hf_linattn.training.head import predict, token_losses

    ids, scored = _window_ids(model, texts, windows), windows[0].scored
    predictions = forward(model, ids, scored + 1, run=predict, use_cache=False)
    if isinstance(predictions, Tensor):
        return _nats(predictions[:, -scored - 1 : -1], ids[:, -scored:])
    return token_losses(cross_entropy, predictions[:, -scored - 1 : -1], ids[:, -scored:])


def part_nats(model: nn.Module, texts: Texts, windows: list[Window], shard: Shard) -> Tensor:
    """Compute nats `[windows, scored]` of the tokens that this process predicts, 0 elsewhere.

    Every process runs the part of the windows that it has, inside `split_rows`.
    """
    from hf_linattn.training.divergence import cross_entropy
    from hf_linattn.training.head import predict, token_losses

    ids, scored = _window_ids(model, texts, windows), windows[0].scored
    part, first = row_part(ids, shard), ids.shape[1] - scored
    keep = min(part.ids.shape[1], scored + 1)  # alike in all processes: what is run depends on it
    predictions = forward(model, part.ids, keep, run=predict, use_cache=False, position_ids=part.position_ids)
    nats = torch.zeros(len(ids), scored, device=ids.device)
    begin = max(part.start, first - 1)  # the first token here that predicts a scored one
    targets = part.targets[:, begin - part.start :]
    if not targets.shape[1]:
        return nats
    left = part.start + part.ids.shape[1] - begin
    chosen = predictions[:, -keep:][:, -left:][:, : targets.shape[1]]
    here = slice(begin + 1 - first, begin + 1 - first + targets.shape[1])
    if isinstance(chosen, Tensor):
        nats[:, here] = _nats(chosen, targets)
    else:
        nats[:, here] = token_losses(cross_entropy, chosen, targets)
    return nats


def _window_ids(model: nn.Module, texts: Texts, windows: list[Window]) -> Tensor:
    ids = torch.stack([texts.documents[w.document].ids[w.start : w.end] for w in windows])
    if texts.window_bos is not None:
        ids[:, 0] = texts.window_bos
    return ids.to(_device(model))


def stream_nats(model: nn.Module, ids: Tensor, segment: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the position of the first scored token and `[tokens]` nats in float32, segment by segment.

    The cache that a segment leaves is handed to the next one, so the context is all of `ids` so far.
    """
    ids = ids.to(_device(model))
    cache, argument = None, cache_argument(model)
    for start in range(0, len(ids) - 1, segment):
        part = ids[start : min(start + segment, len(ids) - 1)]
        out = forward(model, part[None], len(part), **{argument: cache}, use_cache=True)
        cache = output_cache(out)
        yield start + 1, _nats(out.logits, ids[None, start + 1 : start + 1 + len(part)])[0]


def forward(
    model: nn.Module, ids: Tensor, keep: int, run: Callable[..., Any] | None = None, **kwargs: Any
) -> Any:
    """Run the model, with logits for the last `keep` positions, or for all where it cannot limit them.

    Args:
        model: gives logits.
        ids: `[B, N]`.
        keep: positions.
        run: takes the model and its keywords, as `predict` does; None calls the model.
        **kwargs: of its forward.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kwargs["logits_to_keep"] = keep
    memory = (
        f"out of memory with {ids.shape[0]} windows of {ids.shape[1]} tokens and {keep} logits each: "
        "take a smaller batch size or stride, or a half precision dtype"
    )
    with explained_failures(model, ids, ids.shape[1], memory):
        return model(input_ids=ids, **kwargs) if run is None else run(model, input_ids=ids, **kwargs)


@contextmanager
def explained_failures(model: nn.Module, ids: Tensor, tokens: int, memory: str) -> Iterator[None]:
    """Say what went wrong in a forward pass over so many tokens; `memory` is said where it does not suffice.

    `ids` are those of the tokens that are known before.

    Raises:
        LinattnError: out of memory.
        DataError: a token that the model does not have.
        UnsupportedModelError: the text is longer than the model's table of positions.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LinattnError(memory) from error
    except (IndexError, RuntimeError) as error:
        if isinstance(error, IndexError) and (highest := int(ids.max())) >= (rows := embedding_rows(model)):
            raise DataError(
                f"the tokenizer made token {highest} of the text, and {type(model).__name__} has {rows} "
                "tokens: name the tokenizer that it was trained with by --tokenizer"
            ) from error
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        # BERT cuts its positions out of a table; RoBERTa begins to count behind the padding
        if not isinstance(error, IndexError) and (limit is None or tokens <= limit - 2):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} failed on {tokens} tokens ({error}); if it learns its positions, its "
            f"table ends at {limit}"
        ) from error


def refuse_nan(logits: Tensor, model: nn.Module) -> None:
    """Refuse logits of which none is the highest.

    Raises:
        DataError: there is NaN among them.
    """
    if bool(logits.isnan().any()):
        raise DataError(f"the logits of {type(model).__name__} are not numbers: {NOT_FINITE}")


def nan_refused(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a logits processor for `generate` that refuses NaN and changes nothing."""

    def checked(_: Tensor, logits: Tensor) -> Tensor:
        refuse_nan(logits, model)
        return logits

    return checked


def embedding_rows(model: Any) -> int:
    """Count the tokens that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Turn logits `[B, N, V]` and tokens `[B, N]` into nats `[B, N]` in float32."""
    # rows of logits, not [B, V, N]: along a strided vocabulary the loss takes four times as long
    parts = [
        F.cross_entropy(chunk.float().flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        for chunk, target in zip(logits.split(LOSS_CHUNK, 1), targets.split(LOSS_CHUNK, 1), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _reset_dynamic_rope(model: nn.Module) -> None:
    """Forget the longest input so far, whose frequencies dynamic NTK would keep for shorter ones."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        # families whose layer types differ hold one RoPE per type, its buffers named after it
        prefixes = (
            {f"{layer_type}_": kind for layer_type, kind in kinds.items()}
            if isinstance(kinds, dict)
            else {"": kinds}
        )
        for prefix, kind in prefixes.items():
            if kind == "dynamic":
                module.register_buffer(
                    f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
                )
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
