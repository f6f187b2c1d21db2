"""Perplexity of a loaded model at several lengths of context, as a metric of the `evaluate` library."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import datasets
import evaluate

# not relative: evaluate.load runs a copy of this file
from hf_linattn.eval.perplexity.measure import measure

_DESCRIPTION = """\
Does more context help or hurt a language model? The same tokens are scored at every length: windows of all
lengths end at the same tokens, and the last `stride` tokens of each window count. Each text is a document of
its own; texts shorter than the longest length are left out. Unlike the Hub's metric `perplexity`, this one
takes the model as it is in memory, so a patched model is what is measured. In a process group every process
must call it.
"""

_KWARGS_DESCRIPTION = """\
Args:
    predictions (list of str): the texts to score, one document each.
    model: a loaded causal language model.
    tokenizer: its tokenizer.
    lengths (list of int): tokens per window.
    stride (int or "full"): scored tokens per window, 256 by default; "full": windows side by side.
    max_tokens (int or None): scored tokens per length, 65536 by default; None takes all.
    batch_size (int): windows per forward pass, 1 by default.
    bos (str): BOS before each document as the tokenizer does ("auto", the default), "yes" or "no"; "window"
        for one at the start of every window.
    join (bool): join the texts, in order, into one document.
Returns:
    dict: lists with one entry per length, shortest first: `lengths`, `perplexities`, `byte_perplexities`,
    `stderrs`, `tokens`; and `rows`, the same with all details.
Examples:
    >>> import evaluate, hf_linattn.eval.length_perplexity as module
    >>> metric = evaluate.load(module.__file__)
    >>> result = metric.compute(predictions=[text], model=model, tokenizer=tokenizer, lengths=[512, 1024])
    >>> result["perplexities"]
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class LengthPerplexity(evaluate.Metric):  # type: ignore[misc]
    """The metric; `compute` is documented in `inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            module_type="metric",
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Value("large_string")}),
        )

    def _compute(
        self, predictions: list[str], *, model: Any, tokenizer: Any, lengths: list[int], **options: Any
    ) -> dict[str, Any]:
        rows = measure(model, tokenizer, predictions, lengths, **options)
        return {
            "lengths": [row.length for row in rows],
            "perplexities": [row.perplexity for row in rows],
            "byte_perplexities": [row.byte_perplexity for row in rows],
            "stderrs": [row.stderr for row in rows],
            "tokens": [row.tokens for row in rows],
            "rows": [asdict(row) for row in rows],
        }
