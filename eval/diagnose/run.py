"""The work behind the diagnose command: text and model in, numbers, tables and pictures out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import set_seed

from hf_linattn.errors import OptionError
from hf_linattn.ops.dispatch import kernels

from ..common.models import ModelSpec, load_config, load_model, load_texts, load_tokenizer, name_of
from ..common.results import check_writable, default_device, recorded, versions
from ..common.windows import side_by_side
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
    check_writable(args.output_dir)
    load_config(args.model)  # first: a wrong folder should not wait for the text
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    _, texts = load_texts(args, tokenizer)
    ids = side_by_side(texts, args.length, args.windows)
    set_seed(args.seed)
    device = default_device()
    spec = ModelSpec(args.model, args.model, args.patch, args.options or {})
    model = load_model(spec, dtype=args.dtype, device=device)
    diagnosis = diagnose(model, ids, tokenizer=tokenizer, progress=True)
    chosen = _choose(diagnosis, args.heads)
    content = {
        "format": FORMAT,
        "command": command,
        "arguments": recorded(args),
        "label": " ".join(filter(None, [name_of(args.model), args.patch])),
        "versions": versions(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        **diagnosis.to_dict(),
    }
    write(args.output_dir, content, diagnosis, chosen)
    return diagnosis


def _choose(diagnosis: Diagnosis, heads: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Choose the heads to draw: those named, else some of the first, the middle and the last layer."""
    if heads is not None:
        for layer, head in heads:
            if (layer, head) not in diagnosis.matrices:
                raise OptionError(
                    f"no head {layer}:{head}: the model has {len(diagnosis.layers)} layers with up to "
                    f"{max(layer.heads for layer in diagnosis.layers)} heads, counted from 0"
                )
        return list(heads)
    last = len(diagnosis.layers) - 1
    chosen = []
    for layer in sorted({0, last // 2, last}):
        count = diagnosis.layers[layer].heads
        step = max(1, count // DRAWN_HEADS)
        chosen += [(layer, head) for head in range(0, count, step)[:DRAWN_HEADS]]
    return chosen
