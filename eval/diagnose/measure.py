"""Diagnosis of a model: windows of text read, every attention call measured, numbers averaged."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from hf_linattn import describe
from hf_linattn.errors import DataError, OptionError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patching.plan import sites_of, transformers_model

from ..common.nll import explained_failures, scoring
from . import statistics
from .attention_weights import Call, watching
from .results import CELLS, Diagnosis, Head, Layer

FEWEST = 4
"""Tokens that a window must have."""
Numbers = dict[str, float | None]
Place = tuple[int, int]
"""Layer and head."""


def diagnose(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tokenizer: Any = None,
    top: int = 5,
    progress: bool = False,
    **inputs: Any,
) -> Diagnosis:
    """Run a model over windows of text and measure what every attention head does.

    The weights are those the model uses, from its own attention functions (see `attention_weights`). Windows
    are read one at a time, without a cache; the model is left unchanged.

    Args:
        model: a causal language model or an encoder, patched or not.
        input_ids: token ids `[B, N]`, a window per row.
        attention_mask: `[B, N]`, 0 for padding, which is left out of every number.
        tokenizer: to name the tokens of `Head.top`; without one they are numbers.
        top: how many keys `Head.top` lists.
        progress: show a bar on stderr.
        **inputs: further arguments of the model's forward; tensors with B rows are cut into rows.

    Raises:
        DataError: `input_ids` is no `[B, N]`, or a window has fewer than 4 tokens that are not padding.
        UnsupportedModelError: no attention goes through transformers' interface, or one through a kernel
            without weights; an encoder-decoder; or a text that is longer than the model's table of positions.
        UnsupportedCallError: an attention is not linear in its values, or does not see every token.
        OptionError: `top` is below 1.
    """
    inside = transformers_model(model)
    accepted = inspect.signature(inside.forward).parameters
    if "decoder_input_ids" in accepted:
        raise UnsupportedModelError(
            f"{type(inside).__name__} is an encoder-decoder: diagnose its encoder, model.get_encoder()"
        )
    if top < 1:
        raise OptionError(f"top must be at least 1, got {top}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if input_ids.ndim != 2 or mask.shape != input_ids.shape or input_ids.shape[0] < 1:
        raise DataError(
            f"input_ids and attention_mask must be [windows, tokens], got {list(input_ids.shape)} and "
            f"{list(mask.shape)}"
        )
    if (fewest := int(mask.bool().sum(1).min())) < FEWEST:
        raise DataError(f"every window needs {FEWEST} tokens beside padding, but one has {fewest}")
    device = next(inside.parameters()).device
    fixed = {"use_cache": False} if "use_cache" in accepted else {}
    recorder = _Recorder({row.module: row.patch for row in describe(inside)})
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(input_ids, desc="diagnose", unit="window", disable=not progress))
        stack.enter_context(scoring(model))
        stack.enter_context(recorder.inputs_noted(inside))
        stack.enter_context(watching(model, recorder.see))
        for row, ids in enumerate(bar):
            cut = slice(row, row + 1)
            rows = {
                name: x[cut] if isinstance(x, Tensor) and x.shape[:1] == input_ids.shape[:1] else x
                for name, x in inputs.items()
            }
            if attention_mask is not None:
                rows["attention_mask"] = mask[cut].to(device)
            recorder.start(mask[row].bool(), ids)
            memory = (
                f"out of memory with the matrices of one layer for {len(ids)} tokens: take a shorter length"
            )
            with explained_failures(model, ids, len(ids), memory):
                model(input_ids=ids[None].to(device), **fixed, **rows)
    if not recorder.layers:
        raise UnsupportedModelError(f"{type(inside).__name__} called none of its attention modules")
    return recorder.result(type(inside).__name__, tokenizer, top)


def layer_of(name: str) -> str:
    """Name the layer around an attention module: `model.layers.3` for `model.layers.3.self_attn`."""
    parts = name.split(".")
    while len(parts) > 1 and not parts[-1].isdecimal():
        parts.pop()
    return ".".join(parts) if parts[-1].isdecimal() else name


class _Recorder:
    """What was measured so far, window by window."""

    def __init__(self, patches: dict[str, str]) -> None:
        self.patches = patches
        self.layers: list[dict[str, Any]] = []
        self.activations: dict[int, list[Numbers]] = defaultdict(list)
        self.heads: dict[Place, list[Numbers]] = defaultdict(list)
        self.bins: dict[Place, list[Tensor]] = defaultdict(list)
        self.received: dict[Place, list[Tensor]] = defaultdict(list)
        self.matrices: dict[Place, NDArray[np.float32]] = {}
        self.entering: dict[str, Tensor] = {}
        self.texts: list[list[int]] = []
        self.length = 0

    def start(self, keep: Tensor, ids: Tensor) -> None:
        """Begin a window; `keep` `[N]` is False for padding, `ids` `[N]`."""
        self.keep, self.calls, self.length = keep.cpu(), 0, len(ids)
        self.texts.append(ids[keep].tolist())

    @contextmanager
    def inputs_noted(self, inside: nn.Module) -> Iterator[None]:
        """Keep what enters the layer around each attention module."""
        handles = []
        for site in sites_of(inside):
            layer = inside.get_submodule(layer_of(site.name))
            handles.append(layer.register_forward_pre_hook(partial(self._note, site.name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.entering.clear()

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if isinstance(states, Tensor) and states.ndim == 3:
            self.entering[name] = states
        else:
            self.entering.pop(name, None)

    def see(self, call: Call) -> None:
        """Measure one call."""
        layer, self.calls = self.calls, self.calls + 1
        queries, keys = call.weights.shape[2:]
        prefix = keys - queries  # learned keys before the text (prefix tuning) are not padding
        if queries != len(self.keep) or prefix < 0:
            raise UnsupportedCallError(
                f"{call.name}: {queries} queries over {keys} keys for {len(self.keep)} tokens; only "
                "attention of every token over all of them can be diagnosed"
            )
        if layer == len(self.layers):
            content = {"layer": layer, "module": call.name, "attention": self.patches[call.name]}
            self.layers.append({**content, "heads": call.query.shape[1], "head_dim": call.query.shape[3]})
        entering = self.entering.get(call.name)
        if entering is not None and entering.shape[1] == queries:
            self.activations[layer].append(statistics.activation_statistics(entering[0].cpu()[self.keep]))
        columns = F.pad(self.keep, (prefix, 0), value=True)
        groups = call.query.shape[1] // call.key.shape[1]
        # float64, which not every accelerator has, and decompositions, which few do faster
        of_call = (call.weights, call.visible, call.query, call.key)
        weights, visible, query, key = (x[0].cpu() for x in of_call)
        for head in range(call.query.shape[1]):
            self._see_head(
                (layer, head),
                weights[head][self.keep][:, columns].double(),
                visible[head][self.keep][:, columns],
                query[head, self.keep].double(),
                key[head // groups, columns].double(),
                call.scaling,
            )

    def _see_head(
        self, place: Place, weights: Tensor, visible: Tensor, query: Tensor, key: Tensor, scaling: float
    ) -> None:
        scores = statistics.score_statistics(query, key, visible, scaling)
        self.heads[place].append({**statistics.head_statistics(weights, visible), **scores})
        self.bins[place].append(statistics.entropy_by_keys(weights, visible))
        self.received[place].append(statistics.received(weights, visible))
        if place not in self.matrices:
            self.matrices[place] = statistics.pooled(weights, CELLS).float().numpy()

    def result(self, model: str, tokenizer: Any, top: int) -> Diagnosis:
        """Take the means over the windows."""
        layers = [
            Layer(**layer, **_means(self.activations[index], ("kurtosis", "inf_norm", "outliers")))
            for index, layer in enumerate(self.layers)
        ]
        heads = [
            Head(
                *place,
                **_means(windows, windows[0]),
                curve=_curve(self.bins[place]),
                top=self._top(self.received[place], tokenizer, top),
            )
            for place, windows in sorted(self.heads.items())
        ]
        return Diagnosis(model, self.length, len(self.texts), layers, heads, self.matrices)

    def _top(self, received: list[Tensor], tokenizer: Any, top: int) -> list[dict[str, Any]]:
        mass = pad_sequence(received, batch_first=True).mean(0)
        values, places = mass.topk(min(top, len(mass)))
        keys = []
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            ids = [
                text[place - len(window) + len(text)]
                for text, window in zip(self.texts, received, strict=True)
                if len(window) - len(text) <= place < len(window)
            ]
            tokens = [str(i) if tokenizer is None else tokenizer.decode([i]) for i in ids]
            keys.append({"position": place, "mass": value, "tokens": tokens})
        return keys


def _means(windows: list[Numbers], names: Iterable[str]) -> dict[str, Any]:
    """Take the mean of each name over the windows that have a number."""
    means = {}
    for name in names:
        values = [value for window in windows if (value := window[name]) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def _curve(windows: list[Tensor]) -> list[dict[str, Any]]:
    """Turn sums `[bins, 4]` of every window into means by bin."""
    sums = pad_sequence(windows, batch_first=True).sum(0)
    return [
        {
            "up_to": 2**index,
            "keys": keys / count,
            "entropy": entropy / count,
            "relative_entropy": relative / count if index else None,  # log 1 = 0
        }
        for index, (count, keys, entropy, relative) in enumerate(sums.tolist())
        if count
    ]
