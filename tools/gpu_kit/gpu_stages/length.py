"""Stage `length`: perplexity of books-1m, read as one stream, by kernels and by torch operations.

The model is patched and not trained, so that its perplexity is of no interest by itself: the two forms must
agree, also after a million tokens.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from .work import Case, Context, Row, kernels

LENGTHS = (65536, 262144, 1_000_000)
WARM = 8192
"""Tokens that are read before anything is timed."""
ALLOWED = 1e-3
"""Difference of the mean losses, in nats."""


def cases(context: Context) -> list[Case]:
    """List dtypes, patches and lengths, the short ones first."""
    if context.dry:
        return [_case(context, 60, "elu1", "float32")]
    return [
        _case(context, length, patch, dtype)
        for length in LENGTHS
        for patch in ("elu1", "window+elu1")
        for dtype in ("bfloat16", "float32")
    ]


def _case(context: Context, length: int, patch: str, dtype: str) -> Case:
    case = {"tokens": length, "patch": patch, "dtype": dtype}
    return Case(case, partial(_row, context, length, patch, dtype))


def data(context: Context) -> tuple[str, str]:
    """Find model and text: in the kit, else under HF_LINATTN_DATA.

    Raises:
        FileNotFoundError: in neither.
    """
    if (context.kit / "model").is_dir():
        return str(context.kit / "model"), str(context.kit / "text")
    root = os.environ.get("HF_LINATTN_DATA")
    if root and Path(root, "models", "books-1m").is_dir():
        return str(Path(root, "models", "books-1m")), str(Path(root, "text", "books", "eval"))
    raise FileNotFoundError(
        "no model: run this from the folder that make gpu-kit makes, or set HF_LINATTN_DATA"
    )


def _row(context: Context, length: int, patch: str, dtype: str) -> Row:
    model, text = data(context)
    for wish in ("0", "1"):  # compiles and checks what is timed below
        _measure(wish, model, text, min(length, WARM), patch, dtype)
    torch_form, by_kernels = (_measure(wish, model, text, length, patch, dtype) for wish in ("0", "1"))
    row: Row = {f"{name}_kernels": value for name, value in by_kernels.items()}
    row |= {f"{name}_torch": value for name, value in torch_form.items()}
    apart = abs(math.log(by_kernels["perplexity"]) - math.log(torch_form["perplexity"]))
    row["apart"] = apart
    if not apart <= ALLOWED:
        row["error"] = (
            f"kernels and torch operations differ by {apart:.2e} nats a token, {ALLOWED:g} is allowed"
        )
    return row


def _measure(wish: str, model: str, text: str, length: int, patch: str, dtype: str) -> dict[str, Any]:
    from hf_linattn.eval.perplexity import PerplexityArguments
    from hf_linattn.eval.perplexity.run import perplexity

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, kernels(wish):
        arguments = PerplexityArguments(
            model,
            text,
            Path(folder, "out"),
            join=True,
            stream=True,
            max_tokens=length,
            patch=patch,
            dtype=dtype,
        )
        rows = perplexity(arguments)["rows"]
    seconds = time.perf_counter() - start
    (row,) = rows[-1:]
    return {"perplexity": row["perplexity"], "tokens": row.get("tokens"), "seconds": seconds}
