"""The texts of the study: for each base one to train on and one to measure on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan import BASES, BLOCK, SCORED, Base, Workspace
from recall_rows import TEXT_SHARE, TRAINED, Ids, ordinary_tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_linattn.cli.files import replacing
from hf_linattn.data import load_documents
from hf_linattn.demo.stdlib_text import stdlib_files
from hf_linattn.errors import DataError

PER_BOOK = 400_000
"""Characters of each book to train on: 15 books then are 1.7 M tokens, more than a run reads."""
SPARE = 256
"""Tokens kept beyond what is scored, for the tokens at a cut can differ when the text is read again."""
STORY = re.compile(r"\n\s*(?=Once upon a time)")


def prepare(workspace: Workspace) -> None:
    """Write `train.jsonl` and `held_out.jsonl`, and new weights where a base has none, unless they are there.

    Raises:
        DataError: the data folder has not got what the base needs.
    """
    if workspace.base.name == "scratch":
        _new_weights(workspace.path(BASES["books"].model), workspace.model)
    if not workspace.model.is_dir():
        raise DataError(f"{workspace.model} is not there: {_hint(workspace.base)}")
    for which in ("train", "held_out"):
        if not workspace.text(which).exists():
            _write(workspace.text(which), _cut(workspace, which, _texts(workspace, which)))


def _hint(base: Base) -> str:
    if base.model.startswith("work:"):
        return f"make it with studies/pretrain_recall.py and link it there as {base.model[5:]}"
    return "--data is the folder with models/ and text/"


def _new_weights(like: Path, folder: Path) -> None:
    """Save a model of the same configuration and tokenizer."""
    if folder.is_dir() or not like.is_dir():
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(like)))
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(str(like)).save_pretrained(partial)
    partial.replace(folder)


def _texts(workspace: Workspace, which: str) -> list[str]:
    base = workspace.base
    if base.documents == "code":
        files = stdlib_files(held_out=which == "held_out")
        return [path.read_text(encoding="utf-8", errors="replace") for path in files]
    source = base.train if which == "train" else base.held_out
    return list(load_documents(workspace.path(source))["text"])


def _cut(workspace: Workspace, which: str, texts: list[str]) -> list[str]:
    """Cut texts into the documents of a base."""
    documents = workspace.base.documents
    if documents == "stories":
        stories = [story.strip() for text in texts for story in STORY.split(text)]
        joined = [story for story in stories if story]
        return joined if which == "train" else ["\n\n".join(joined)]
    if documents == "code" and which == "held_out":
        texts = ["\n\n".join(texts)]  # single files are shorter than the longest window
    if which == "train" and documents in ("books", "recalling"):
        texts = [text[:PER_BOOK] for text in texts]
    if which == "train" and not documents.startswith("recalling"):
        return texts
    tokenizer = AutoTokenizer.from_pretrained(str(workspace.model))
    if which == "train":
        # each row is a block, together with the token that begins it
        return recalling(texts, tokenizer, BLOCK - 1)
    tokens = SCORED // len(texts) + SPARE
    cut = []
    for text in texts:
        places = tokenizer(
            text[: tokens * 8], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        if len(places["input_ids"]) < tokens:
            raise DataError(f"a held-out text of {workspace.base.name} has fewer than {tokens} tokens")
        cut.append(text[: places["offset_mapping"][tokens - 1][1]])
    return cut


def recalling(texts: Sequence[str], tokenizer: Any, length: int) -> list[str]:
    """Make rows of `length` tokens, each a text: plain, or one of the kinds of `recall_rows`.

    A model that can recall, trained further on prose alone, forgets it; so its conversions are trained on
    rows of the kinds that it learned from.
    """
    rng = np.random.default_rng([*b"recalling"])
    lone, rows = lone_tokens(tokenizer), []
    for text in texts:
        ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        for row in ids[: len(ids) // length * length].reshape(-1, length):
            if rng.random() >= TEXT_SHARE:
                row, _ = TRAINED[rng.integers(len(TRAINED))](rng, row, lone)
            rows.append(tokenizer.decode(row))
    return rows


def lone_tokens(tokenizer: Any) -> Ids:
    """Return ordinary tokens that begin with a space and read again as the same, also behind each other."""
    lone = []
    for token in ordinary_tokens(tokenizer).tolist():
        text = tokenizer.decode([token])
        if text[:1] == " " and text[1:].isalpha():
            again = tokenizer(text, add_special_tokens=False)["input_ids"]
            lone += [token] if again == [token] else []
    return np.array(lone, dtype=np.int32)


def _write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
