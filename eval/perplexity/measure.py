"""Perplexity of a model over planned windows, or over whole documents read in one stream.

    rows = measure(model, tokenizer, [text], [512, 1024, 2048], stride=256)
    print(rows[-1].perplexity, rows[-1].stderr)

Sums are kept per window, exchanged between the processes and added with `math.fsum`: a result does not depend
on the number of processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from hf_linattn.errors import DataError, OptionError
from hf_linattn.parallel import Shard
from hf_linattn.patching.causality import require_causal

from ..common.nll import part_nats, scoring, stream_nats, window_nats
from ..common.statistics import Bucket, Row, WindowScore, make_row, score_windows
from ..common.windows import Bos, Plan, Stride, Texts, bucket_edges, encode, plan_windows


def measure(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str],
    lengths: Sequence[int],
    *,
    stride: Stride = 256,
    max_tokens: int | None = 65536,
    batch_size: int = 1,
    bos: Bos = "auto",
    join: bool = False,
    progress: bool = False,
) -> list[Row]:
    """Measure perplexity at every length, shortest first, as the command `hf_linattn.eval.perplexity` does.

    In a process group every process must call it, with the same arguments; each gets all rows.

    Args:
        model: a causal language model; left unchanged.
        tokenizer: its tokenizer.
        documents: one string per document.
        lengths: tokens per window.
        stride: the last `stride` tokens of each window are scored, the same tokens at all lengths; "full"
            scores windows that lie side by side.
        max_tokens: scored tokens per length (with "full": tokens read); None takes all.
        batch_size: windows per forward pass.
        bos: "auto", "yes", "no" or "window", see `windows.encode`.
        join: one document of all.
        progress: show a bar on stderr.

    Raises:
        OptionError: a length, the stride, the budget or the batch size is out of its range.
        DataError: no document is long enough, or the loss is not finite.
        UnsupportedModelError: the model sees later tokens (an encoder).

    Example:
        >>> import torch
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        >>> _ = torch.manual_seed(0)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=27, num_hidden_layers=1, **sizes))
        >>> letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [])))
        >>> rows = measure(model, tokenizer, ["a rose is a rose is a rose"], [8, 16], stride=4)
        >>> [(row.length, row.tokens, round(row.perplexity)) for row in rows]
        [(8, 12, 25), (16, 12, 25)]
    """
    texts = encode(tokenizer, documents, bos=bos, join=join)
    plan = plan_windows(texts, lengths, stride=stride, max_tokens=max_tokens)
    require_causal(model)
    return [
        score_length(model, plan, length, batch_size=batch_size, progress=progress) for length in plan.lengths
    ]


def score_length(
    model: nn.Module,
    plan: Plan,
    length: int,
    *,
    batch_size: int = 1,
    progress: bool = False,
    shard: Shard | None = None,
) -> Row:
    """Score the windows of one length with a causal model.

    Args:
        model: that `require_causal` lets pass; left unchanged.
        plan: the windows of every length.
        length: tokens per window, one of the plan's.
        batch_size: windows per forward pass.
        progress: show a bar on stderr.
        shard: the part of each window that this process reads, inside `split_rows`; None for whole windows,
            which the processes share.

    Raises:
        OptionError: the batch size is below 1.
        DataError: the loss is not finite, or windows cannot be split into equal parts.
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, got {batch_size}")
    windows = plan.windows(length)
    edges = bucket_edges(length - windows[0].scored, length)
    rank, size = _process() if shard is None else (0, 1)
    sums: dict[int, list[float]] = {}
    with scoring(model), _bar(len(windows) * length, f"length {length}", progress) as advance:
        # whole batches are dealt out: the rounding of a forward pass is the same for any number of processes
        for start in range(0, len(windows), batch_size)[rank::size]:
            batch = windows[start : start + batch_size]
            if shard is None:
                of_tokens = window_nats(model, plan.texts, batch)
            else:
                of_tokens = part_nats(model, plan.texts, batch, shard)
            parts = _bucket_sums(of_tokens, edges)
            sums.update(enumerate(parts, start))
            advance(len(batch) * length * size)
    sums = _exchange(sums) if shard is None else _added(sums)
    scores = score_windows(plan.texts, windows, [math.fsum(sums[index]) for index in range(len(windows))])
    buckets = []
    for k, (low, high) in enumerate(pairwise(edges)):
        tokens = len(windows) * (high - low)
        nats = math.fsum(sums[index][k] for index in range(len(windows))) / tokens
        buckets.append(Bucket(low, high, tokens, nats, math.exp(nats)))
    return make_row(length, scores, buckets)


def score_stream(
    model: nn.Module,
    texts: Texts,
    *,
    max_tokens: int | None = None,
    segment: int = 4096,
    progress: bool = False,
) -> list[Row]:
    """Score documents read from their first token on, through the cache: a row per position bucket.

    The context of a token is all of its document so far. With linear attention the memory does not grow with
    it; any other model works too, with a cache as long as the document.

    Args:
        model: that `require_causal` lets pass; left unchanged.
        texts: what `encode` gives.
        max_tokens: tokens read in all, an equal share from the start of every document; None reads all.
        segment: tokens per forward pass.
        progress: show a bar on stderr.

    Raises:
        OptionError: the segment is below 1 token, or the share of a document below 2.
        DataError: there is nothing to score, or the loss is not finite.
    """
    documents = texts.documents
    share = texts.longest if max_tokens is None else max_tokens // len(documents)
    if segment < 1 or (max_tokens is not None and share < 2):
        raise OptionError(
            f"segment {segment} must be at least 1 token, and max_tokens {max_tokens} at least 2 for each of "
            f"{len(documents)} documents"
        )
    ends = [min(len(document), share) for document in documents]
    if max(ends) < 2:
        raise DataError("every document has a single token: nothing can be scored")
    edges = bucket_edges(1, max(ends))
    rank, size = _process()
    sums: dict[int, list[float]] = {}
    with scoring(model), _bar(sum(ends), "stream", progress) as advance:
        for index in range(rank, len(documents), size):
            sums[index] = [0.0] * (len(edges) - 1)
            for start, nll in stream_nats(model, documents[index].ids[: ends[index]], segment):
                _add_by_position(sums[index], edges, start, nll)
                advance(nll.numel() * size)
    sums = _exchange(sums)
    scores: dict[int, list[WindowScore]] = defaultdict(list)
    for index, document in enumerate(documents):
        for (low, high), nats in zip(pairwise(edges), sums[index], strict=True):
            stop = min(high, ends[index])
            if stop > low:
                scores[high].append(WindowScore(index, stop - low, document.bytes_between(low, stop), nats))
    return [make_row(end, scores[end], []) for end in edges[1:]]


def _bucket_sums(nats: Tensor, edges: list[int]) -> list[list[float]]:
    """Sum nats `[B, N]` by bucket in float64, which Apple's GPUs do not have: B lists."""
    widths = [high - low for low, high in pairwise(edges)]
    parts = nats.cpu().double().split(widths, 1)
    sums: list[list[float]] = torch.stack([part.sum(1) for part in parts], 1).tolist()
    return sums


def _add_by_position(sums: list[float], edges: list[int], start: int, nats: Tensor) -> None:
    """Add the nats of positions start, start + 1, ... to their buckets."""
    nats = nats.cpu().double()
    for k, (low, high) in enumerate(pairwise(edges)):
        part = nats[max(low - start, 0) : max(high - start, 0)]
        if len(part):
            sums[k] += float(part.sum())


def _process() -> tuple[int, int]:
    """Return the rank and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _exchange(sums: dict[int, list[float]]) -> dict[int, list[float]]:
    """Unite what all processes hold."""
    if _process()[1] == 1:
        return sums
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, sums)
    return {index: values for part in parts for index, values in part.items()}


def _added(sums: dict[int, list[float]]) -> dict[int, list[float]]:
    """Add up what all processes hold of the same windows."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, sums)
    buckets = {index: zip(*(part[index] for part in parts), strict=True) for index in sums}
    return {index: list(map(math.fsum, each)) for index, each in buckets.items()}


@contextmanager
def _bar(total: int, name: str, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr in tokens and tokens/s, in the first process only."""
    hidden = not shown or _process()[0] > 0
    with tqdm(total=total, desc=name, unit="tok", unit_scale=True, disable=hidden) as bar:
        yield lambda tokens: bar.update(min(tokens, total - bar.n))
