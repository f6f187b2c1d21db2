"""The texts of the study: for each base a table to train on and one to measure on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from catalogue_measure import STORY
from study_bases import BOOKS, Base
from study_place import Place
from study_recalling import recalling
from study_row import BLOCK
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_linattn.checkpointing import replacing
from hf_linattn.data import load_documents
from hf_linattn.errors import DataError
from hf_linattn.stdlib_text import stdlib_files

PER_BOOK = 400_000
"""Characters of each book to train on: 15 books then are 1.7 M tokens, more than a run reads."""
SPARE = 256
"""Tokens kept beyond what is scored, for the tokens at a cut can differ when the text is read again."""


def prepare(place: Place) -> None:
    """Write `train.jsonl` and `held_out.jsonl`, and new weights where a base has none, unless they are there.

    Raises:
        DataError: the data folder has not got what the base needs.
    """
    if place.base.name == "scratch":
        _new_weights(place.data / BOOKS[0], place.model)
    if not place.model.is_dir():
        raise DataError(f"{place.model} is not there: {_hint(place.base)}")
    for which in ("train", "held_out"):
        if not place.text(which).exists():
            _write(place.text(which), _cut(place, which, _texts(place, which)))


def _hint(base: Base) -> str:
    if base.model.startswith("work:"):
        return f"make it with examples/pretrain_recall.py and link it there as {base.model[5:]}"
    return "--data is the folder with models/ and text/"


def _new_weights(like: Path, folder: Path) -> None:
    """A model of the same configuration and tokenizer."""
    if folder.is_dir() or not like.is_dir():
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(like)))
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(str(like)).save_pretrained(partial)
    partial.replace(folder)


def _texts(place: Place, which: str) -> list[str]:
    if place.base.documents == "code":
        files = stdlib_files(held_out=which == "held_out")
        return [path.read_text(encoding="utf-8", errors="replace") for path in files]
    source = place.base.train if which == "train" else place.base.held_out
    return list(load_documents(place.path(source))["text"])


def _cut(place: Place, which: str, texts: list[str]) -> list[str]:
    if place.base.documents == "stories":
        stories = [story.strip() for text in texts for story in STORY.split(text)]
        joined = [story for story in stories if story]
        return joined if which == "train" else ["\n\n".join(joined)]
    if place.base.documents == "code" and which == "held_out":
        texts = ["\n\n".join(texts)]  # single files are shorter than the longest window
    if which == "train" and place.base.documents in ("books", "recalling"):
        texts = [text[:PER_BOOK] for text in texts]
    if which == "train" and not place.base.documents.startswith("recalling"):
        return texts
    tokenizer = AutoTokenizer.from_pretrained(str(place.model))
    if which == "train":
        # each row is a block, together with the token that begins it
        return recalling(texts, tokenizer, BLOCK - 1)
    tokens = place.base.scored // len(texts) + SPARE
    cut = []
    for text in texts:
        places = tokenizer(
            text[: tokens * 8], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        if len(places["input_ids"]) < tokens:
            raise DataError(f"a held-out text of {place.base.name} has fewer than {tokens} tokens")
        cut.append(text[: places["offset_mapping"][tokens - 1][1]])
    return cut


def _write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
