"""The texts of the study: for each base a table to train on and one to measure on."""

from __future__ import annotations

import json
from pathlib import Path

from catalogue_measure import STORY
from study_plan import BLOCK, Base, Place
from study_recalling import recalling

from hf_linattn.checkpointing import replacing
from hf_linattn.data import load_documents
from hf_linattn.errors import DataError

PER_BOOK = 400_000
"""Characters of each book to train on: 15 books then are 1.7 M tokens, more than a run reads."""
SPARE = 256
"""Tokens kept beyond what is scored, for the tokens at a cut can differ when the text is read again."""


def prepare(place: Place) -> None:
    """Write `train.jsonl` and `held_out.jsonl`, unless they are there.

    Raises:
        DataError: the data folder has not got what the base needs.
    """
    if not place.model.is_dir():
        raise DataError(f"{place.model} is not there: {_hint(place.base)}")
    for which, source in (("train", place.base.train), ("held_out", place.base.held_out)):
        if not place.text(which).exists():
            texts = list(load_documents(place.path(source))["text"])
            _write(place.text(which), _cut(place, which, texts))


def _hint(base: Base) -> str:
    if base.model.startswith("work:"):
        return f"make it with examples/pretrain_recall.py and link it there as {base.model[5:]}"
    return "--data is the folder with models/ and text/"


def _cut(place: Place, which: str, texts: list[str]) -> list[str]:
    if place.base.documents == "stories":
        stories = [story.strip() for text in texts for story in STORY.split(text)]
        joined = [story for story in stories if story]
        return joined if which == "train" else ["\n\n".join(joined)]
    if which == "train" and place.base.documents == "books":
        return [text[:PER_BOOK] for text in texts]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(place.model))
    if which == "train":
        # each row is a block, together with the token that begins it
        return recalling([text[:PER_BOOK] for text in texts], tokenizer, BLOCK - 1)
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
