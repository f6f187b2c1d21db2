"""The work behind the diagnose command: text and model in, numbers, tables and pictures out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import set_seed
from transformers.utils import logging

from hf_linattn.data import load_documents
from hf_linattn.errors import OptionError

from ..common.models import Curve, load_config, load_model, load_tokenizer
from ..common.results import check_writable, versions
from ..common.windows import Texts, encode, plan_windows
from .measure import diagnose
from .outputs import FORMAT, write
from .results import Diagnosis

DRAWN_HEADS = 4
"""Heads per layer that are drawn unless named."""


def run(args: argparse.Namespace, command: str) -> Diagnosis:
    """Diagnose and write all files.

    Raises:
        DataError: the text is missing or shorter than one window.
        OptionError: `--heads` names a head that the model has not.
        LinattnError: the model or the patch does not suit.
    """
    import datasets

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    check_writable(args.output_dir)
    load_config(args.model)  # first: a wrong folder should not wait for the text
    documents = list(load_documents(args.data, column=args.column, split=args.split)["text"])
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    texts = encode(tokenizer, documents, bos=args.bos, join=args.join)
    ids = windows(texts, args.length, args.windows)
    set_seed(args.seed)
    on_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    curve = Curve(args.model, args.model, args.patch, args.options or {})
    model = load_model(curve, dtype=args.dtype, device=on_device or "cpu")
    found = diagnose(model, ids, tokenizer=tokenizer, progress=True)
    chosen = choose(found, args.heads)
    arguments = {key: value for key, value in vars(args).items() if key != "output_dir"}
    content = {
        "format": FORMAT,
        "command": command,
        "arguments": arguments,
        "label": " ".join(filter(None, [Path(args.model).name or args.model, args.patch])),
        "versions": versions(),
        "device": str(on_device or "cpu"),
        **found.to_dict(),
    }
    write(args.output_dir, content, found, chosen)
    return found


def windows(texts: Texts, length: int, count: int) -> torch.Tensor:
    """`[count or fewer, length]` tokens: windows side by side, in turn from every document.

    Raises:
        DataError: no document is that long.
    """
    plan = plan_windows(texts, [length], stride="full", max_tokens=length * count)
    ids = torch.stack([texts.documents[w.document].ids[w.start : w.end] for w in plan.windows(length)])
    if texts.window_bos is not None:
        ids[:, 0] = texts.window_bos
    return ids


def choose(found: Diagnosis, heads: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """The heads to draw.

    Raises:
        OptionError: one of those named does not exist.
    """
    if heads is not None:
        for layer, head in heads:
            if (layer, head) not in found.matrices:
                raise OptionError(
                    f"no head {layer}:{head}: the model has {len(found.layers)} layers with up to "
                    f"{max(layer.heads for layer in found.layers)} heads, counted from 0"
                )
        return list(heads)
    last = len(found.layers) - 1
    chosen = []
    for layer in sorted({0, last // 2, last}):
        count = found.layers[layer].heads
        step = max(1, count // DRAWN_HEADS)
        chosen += [(layer, head) for head in range(0, count, step)[:DRAWN_HEADS]]
    return chosen
