"""Text that a model writes itself, for conversion where no other text is at hand.

Every row begins with the tokenizer's BOS token (else EOS, else any token) and is sampled from the model's own
distribution, neither sharpened nor cut ("LLM-QAT: Data-Free Quantization Aware Training", arXiv:2305.17888,
section 2.1, finds sampled text better than greedy text).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_linattn.cli.files import writing
from hf_linattn.data import document_separator
from hf_linattn.errors import DataError

ROWS = 16
"""Rows that are written together; which tokens they hold depends on the seed and their number alone."""


@torch.no_grad()
def write_self_text(model: Any, tokenizer: Any, path: Path, *, tokens: int, length: int, seed: int) -> None:
    """Append rows of sampled text to a .jsonl file until they hold enough tokens; a later call goes on.

    Args:
        model: unpatched, in evaluation mode.
        tokenizer: its own.
        path: of the file, one {"text": ...} per row.
        tokens: to write.
        length: tokens per row.
        seed: of the samples.

    Raises:
        DataError: what the model writes is no text.
    """
    batches = -(-tokens // (ROWS * length))
    done = _complete_batches(path)
    first, _ = document_separator(tokenizer)
    with tqdm(total=batches, initial=min(done, batches), desc="own text", unit="batch") as bar:
        for number in range(done, batches):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            starts = torch.randint(len(tokenizer), (ROWS, 1), generator=generator)
            if first is not None:
                starts = torch.full((ROWS, 1), first)
            with torch.random.fork_rng(devices=_devices(model)):
                torch.manual_seed(seed * 1_000_003 + number)
                rows = model.generate(
                    starts.to(model.device),
                    attention_mask=torch.ones_like(starts).to(model.device),
                    max_new_tokens=length,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    eos_token_id=None,
                    pad_token_id=0 if first is None else first,
                )
            texts = tokenizer.batch_decode(rows[:, 1:], skip_special_tokens=True)
            if not any(text.strip() for text in texts):
                raise DataError("--data self: the model writes nothing but blanks; give a text with --data")
            _append(path, number, texts)
            bar.update()


def _devices(model: Any) -> list[Any]:
    return [model.device] if model.device.type == "cuda" else []


def _append(path: Path, number: int, texts: list[str]) -> None:
    lines = [json.dumps({"text": text, "batch": number}) + "\n" for text in texts]
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def _complete_batches(path: Path) -> int:
    """Batches that are there in full; what a kill cut off is removed."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    done = len(complete) // ROWS
    kept = "".join(complete[: done * ROWS])
    if len(kept) < sum(map(len, lines)):
        with writing(path):
            path.write_text(kept, encoding="utf-8")
    return done
