"""Continuations of two models side by side, and how far their predictions lie apart. No files in here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hf_linattn import bypassed
from hf_linattn.errors import DataError, OptionError, UnsupportedModelError
from hf_linattn.patching.cache_layers import cache_argument, output_cache
from hf_linattn.patching.causality import require_causal

from ..common.formatting import NOT_FINITE
from ..common.nll import refuse_nan, scoring, window_logits
from ..common.windows import Bos, Document, Texts, Window, encode
from .comparison import ORIGINAL, Comparison, Continuation, agreement, repetition

POSITIONS = 64
"""Positions whose logits are raised to float32 at a time."""

Side = Callable[[], AbstractContextManager[nn.Module]]
"""Gives a model that computes as one of the two, for a while."""


def compare_generation(
    original: nn.Module | None,
    others: Mapping[str, nn.Module],
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    new_tokens: int = 64,
    batch_size: int = 8,
    bos: Bos = "auto",
    progress: bool = False,
) -> Comparison:
    """Let models continue the same prompts greedily, and compare them with the original.

    Args:
        original: the unpatched model. None takes the one patched model with its own attention (`bypassed`):
            that is the original as long as its weights were not trained since.
        others: patched models by label; all models are left unchanged.
        tokenizer: of all of them.
        prompts: texts; empty ones are left out.
        new_tokens: tokens to write after each prompt, fewer where the original's end-of-text token comes.
        batch_size: prompts of one length per forward pass.
        bos: "auto", "yes" or "no", see `windows.encode`.
        progress: show bars on stderr.

    Raises:
        OptionError: nothing to compare, or a number below 1.
        DataError: no prompt holds a token, other vocabularies, or predictions that are not numbers.
        UnsupportedModelError: a model that sees later tokens (an encoder), or has no cache.
        NotPatchedError: no original, and a model that is not patched.
    """
    if not others or ORIGINAL in others:
        raise OptionError(f"name at least one other model, and none of them {ORIGINAL!r}")
    if original is None and len(others) > 1:
        raise OptionError("several models need an original of their own: their weights may differ")
    rows = [document.ids.tolist() for document in encode(tokenizer, prompts, bos=bos).documents]
    own = side_of(next(iter(others.values())), own=True) if original is None else side_of(original)
    comparer = Comparer(own, Comparison(rows, []), new_tokens, batch_size, progress)
    comparer.add_original()
    for label, model in others.items():
        comparer.add(label, side_of(model))
    return comparer.comparison


def side_of(model: nn.Module, *, own: bool = False) -> Side:
    """Use the model as it is, or with `own` the original inside a patched one."""

    @contextmanager
    def use() -> Iterator[nn.Module]:
        with bypassed(model) if own else nullcontext(), scoring(model):
            yield model

    return use


@dataclass(frozen=True)
class Comparer:
    """Continues prompts greedily with a model and others, and compares them.

    Attributes:
        original: the model to compare with.
        comparison: the prompts, and the continuations so far.
        new_tokens: tokens to write at most.
        batch_size: prompts of one length per forward pass.
        progress: show bars on stderr.

    Raises:
        OptionError: a number below 1.
    """

    original: Side
    comparison: Comparison
    new_tokens: int
    batch_size: int = 8
    progress: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that make no text."""
        if self.new_tokens < 1 or self.batch_size < 1:
            numbers = f"{self.new_tokens} and {self.batch_size}"
            raise OptionError(f"new tokens and batch size must be at least 1, got {numbers}")

    def add_original(self) -> None:
        """Add the continuations of the original.

        Raises:
            UnsupportedModelError: a model that sees later tokens, or has no cache.
        """
        written = self._continue(ORIGINAL, self.original)
        self.comparison.continuations.extend(
            Continuation(ORIGINAL, index, row, repetition(row)) for index, row in enumerate(written)
        )

    def add(self, label: str, other: Side) -> None:
        """Add the continuations of another model, compared with the original's.

        Raises:
            UnsupportedModelError: a model that sees later tokens, or has no cache.
            DataError: other vocabularies, or predictions that are not numbers.
        """
        written, originals = self._continue(label, other), self.comparison.of(ORIGINAL)
        rows = zip(written, originals, self._divergences(label, other, originals), strict=True)
        self.comparison.continuations.extend(
            Continuation(label, first.prompt, row, repetition(row), agreement(first.ids, row), *apart)
            for row, first, apart in rows
        )

    def _continue(self, label: str, side: Side) -> list[list[int]]:
        """Continue all prompts, up to a token that ends a text of the original."""
        prompts = self.comparison.prompts
        written: dict[int, list[int]] = {}
        total = len(prompts) * self.new_tokens
        with side() as model:
            _check(model, max(map(len, prompts)) + self.new_tokens)
        with self.original() as model:
            ends = stops(model)
        with tqdm(total=total, desc=label, unit="tok", disable=not self.progress) as bar:
            for batch in _batches(list(map(len, prompts)), self.batch_size):
                ids = torch.tensor([prompts[index] for index in batch])
                with side() as model:
                    rows = _greedy(model, ids, self.new_tokens, ends, bar.update)
                written.update(zip(batch, rows, strict=True))
            bar.update(total - bar.n)
        return [written[index] for index in range(len(prompts))]

    def _divergences(
        self, label: str, other: Side, originals: Sequence[Continuation]
    ) -> list[tuple[tuple[float, ...], tuple[bool, ...]]]:
        """Compute KL(original || other) and whether both write the same token, along the original's text."""
        from hf_linattn.training.divergence import token_divergence  # not before a model is there

        pairs = zip(self.comparison.prompts, originals, strict=True)
        rows = [torch.tensor([*prompt, *one.ids]) for prompt, one in pairs]
        texts = Texts([Document(row, torch.arange(len(row))) for row in rows], None)
        shapes = [(len(row), len(one.ids)) for row, one in zip(rows, originals, strict=True)]
        results: dict[int, tuple[tuple[float, ...], tuple[bool, ...]]] = {}
        with tqdm(total=len(rows), desc=f"{label}, KL", unit="prompt", disable=not self.progress) as bar:
            for batch in _batches(shapes, self.batch_size):
                windows = [Window(index, 0, *shapes[index]) for index in batch]
                with self.original() as model:
                    first, _ = window_logits(model, texts, windows)
                with other() as model:
                    second, _ = window_logits(model, texts, windows)
                if first.shape != second.shape:
                    raise DataError(
                        f"{label} predicts one of {second.shape[-1]} tokens, the original one of "
                        f"{first.shape[-1]}: predictions can be compared over one vocabulary only"
                    )
                parts = zip(first.split(POSITIONS, 1), second.split(POSITIONS, 1), strict=True)
                divergences = [token_divergence(theirs, own.to(theirs.device)) for own, theirs in parts]
                kl = torch.cat(divergences, 1).clamp_min(0)  # rounding takes it below
                if not bool(kl.isfinite().all()):
                    raise DataError(f"KL(original || {label}) is not finite: {NOT_FINITE}")
                same = first.argmax(-1).cpu() == second.argmax(-1).cpu()
                of_batch = zip(map(tuple, kl.tolist()), map(tuple, same.tolist()), strict=True)
                results.update(zip(batch, of_batch, strict=True))
                bar.update(len(batch))
        return [results[index] for index in range(len(rows))]


def _check(model: nn.Module, length: int) -> None:
    """Refuse what cannot continue a text of this length, before anything is measured."""
    require_causal(model)
    ids = torch.zeros(length, dtype=torch.long)
    window_logits(model, Texts([Document(ids, ids)], None), [Window(0, 0, length, 1)])


def _greedy(
    model: nn.Module, ids: Tensor, new_tokens: int, ends: frozenset[int], advance: Callable[[int], object]
) -> list[list[int]]:
    """Continue `[B, N]` by the tokens with the highest logit, through the model's cache: B lists."""
    step = ids.to(next(model.parameters()).device)
    stop = torch.tensor(sorted(ends), dtype=torch.long, device=step.device)
    ended = torch.zeros(len(step), dtype=torch.bool, device=step.device)
    written, cache, argument = [], None, cache_argument(model)
    for _ in range(new_tokens):
        out = model(input_ids=step, **{argument: cache}, use_cache=True)
        cache = output_cache(out)
        if cache is None:
            raise UnsupportedModelError(f"{type(model).__name__} keeps no cache to continue a text from")
        logits = out.logits[:, -1]
        refuse_nan(logits, model)
        step = logits.argmax(-1, keepdim=True)
        written.append(step)
        advance(len(step))
        ended |= torch.isin(step[:, 0], stop)
        if bool(ended.all()):
            break
    rows: list[list[int]] = torch.cat(written, 1).tolist()
    last = [next((place for place, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[: end + 1] for row, end in zip(rows, last, strict=True)]


def _batches(shapes: Sequence[Any], batch_size: int) -> Iterator[list[int]]:
    """Yield indices with equal shapes, so that nothing is padded."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        groups[shape].append(index)
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def stops(model: nn.Module) -> frozenset[int]:
    """Name the tokens that end a text, as the model's configurations have them."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()
