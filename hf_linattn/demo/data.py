"""Prepare the texts of the demo: what is trained on, what is kept back, and prompts from the latter."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_linattn.data import load_documents
from hf_linattn.demo.stdlib_text import stdlib_files
from hf_linattn.errors import DataError

CHARACTERS_PER_TOKEN = 8
"""More than a token has in nearly all texts: so many characters per token needed are enough."""

HELD_OUT_SHARE = 0.1
"""Part of a text that is kept back when no evaluation text is given."""

HELD_OUT_LIMIT = 2_000_000
"""Characters of evaluation text that are used at most."""

SHORT_PROMPT = 48
"""Tokens of the short prompt; the long one has twice the block size."""

Documents = list[tuple[str, str]]
"""(name, text) of each document."""


@dataclass(frozen=True)
class DemoData:
    """What `prepare` has written.

    Attributes:
        train, held_out: for --data and --eval-data; as text, so that the record is JSON.
        prompts: files with a prompt each.
        join: whether the held-out documents must be joined to reach the longest length.
        lengths: those of the wanted lengths that the held-out text can fill.
        notes: sentences on what was done with the text.
    """

    train: str
    held_out: str
    prompts: list[str]
    join: bool
    lengths: list[int]
    notes: list[str]


def prepare(
    folder: Path,
    tokenizer: Any,
    *,
    data: str | None,
    eval_data: str | None,
    train_tokens: int,
    block_size: int,
    lengths: Sequence[int],
) -> DemoData:
    """Write the texts to `folder`, or find them there.

    Args:
        folder: does not exist, or comes from an earlier call.
        tokenizer: tells which lengths the text can fill.
        data: as `hf_linattn.data.load_documents` takes it; None takes the standard library's source.
        eval_data: the same; None keeps back the end of `data`.
        train_tokens: tokens that a run trains on, all its steps together.
        block_size: tokens per training row.
        lengths: tokens of context, wanted.

    Raises:
        DataError: the text cannot be read or is too short.
    """
    record = folder / "data.json"
    if record.exists():
        return DemoData(**json.loads(record.read_text(encoding="utf-8")))
    budget = train_tokens * CHARACTERS_PER_TOKEN
    train, held_out, notes = (
        _stdlib(budget) if data is None and eval_data is None else _own(data, eval_data, budget)
    )
    sizes = [
        len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for _, text in held_out
    ]
    fitting, join = _fit(sizes, lengths, notes)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    as_table = data is not None or eval_data is not None
    names = [
        _write(docs, partial, kind, as_table) for docs, kind in ((train, "train"), (held_out, "held_out"))
    ]
    prompts = _write_prompts(partial / "prompts", tokenizer, held_out[sizes.index(max(sizes))][1], block_size)
    done = DemoData(
        str(folder / names[0]),
        str(folder / names[1]),
        [str(folder / p) for p in prompts],
        join,
        fitting,
        notes,
    )
    (partial / "data.json").write_text(json.dumps(asdict(done), indent=1) + "\n", encoding="utf-8")
    partial.replace(folder)
    return done


def _fit(sizes: Sequence[int], lengths: Sequence[int], notes: list[str]) -> tuple[list[int], bool]:
    """Return the lengths that documents of these sizes fill, and whether they must be joined for that.

    Raises:
        DataError: they fill none.
    """
    join = any(max(sizes) < length <= sum(sizes) for length in lengths)
    reach = sum(sizes) if join else max(sizes)
    fitting = [length for length in lengths if length <= reach]
    if not fitting:
        raise DataError(
            f"the held-out text has {sum(sizes)} tokens, the longest document {max(sizes)}; the smallest "
            f"length is {min(lengths)}: give more text with --eval-data, or smaller --lengths"
        )
    if join:
        notes.append("The held-out documents are shorter than some lengths, so they are joined into one.")
    if len(fitting) < len(lengths):
        notes.append(
            f"The held-out text ends at {reach:,} tokens; lengths beyond {max(fitting):,} are left out."
        )
    return fitting, join


def _stdlib(budget: int) -> tuple[Documents, Documents, list[str]]:
    """Choose a subset of the standard library's files by their names only, and the held-out files."""
    files = stdlib_files(held_out=False)
    files.sort(key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())
    train = _up_to(_read(files), budget)
    held_out = _read(stdlib_files(held_out=True))
    note = (
        f"Text: the source of Python's standard library, {len(train)} files to train on and {len(held_out)} "
        f"others to measure on ({', '.join(name for name, _ in held_out)})."
    )
    return train, held_out, [note]


def _read(files: Sequence[Path]) -> Documents:
    texts = ((path.name, path.read_text(encoding="utf-8", errors="replace")) for path in files)
    return [(name, text) for name, text in texts if text.strip()]


def _up_to(documents: Documents, budget: int) -> Documents:
    """Return the first documents that together have `budget` characters."""
    taken: Documents = []
    for document in documents:
        if budget <= 0:
            break
        taken.append(document)
        budget -= len(document[1])
    return taken


def _own(data: str | None, eval_data: str | None, budget: int) -> tuple[Documents, Documents, list[str]]:
    """Read the user's text, and keep back a part of it if there is no other to measure on."""
    if data is None:
        raise DataError("--eval-data needs --data: the text to train on")
    documents = _load(data)
    if eval_data is not None:
        held_out = _up_to(_load(eval_data), HELD_OUT_LIMIT)
        return _up_to(documents, budget), held_out, [f"Text: trained on {data}, measured on {eval_data}."]
    total = sum(len(text) for _, text in documents)
    wanted = min(int(total * HELD_OUT_SHARE), HELD_OUT_LIMIT)
    kept = len(_up_to(documents[::-1], wanted))
    # the last documents where that keeps most of the text for training, else the end of the last one
    if len(documents) > kept and sum(len(text) for _, text in documents[-kept:]) <= 2 * wanted:
        held_out = documents[-kept:]
        documents = documents[:-kept]
        what = f"the last {kept} of {kept + len(documents)} documents" if kept > 1 else "the last document"
    else:
        name, text = documents[-1]
        cut = max(len(text) - max(wanted, 1), len(text) // 2)
        held_out = [(name, text[cut:])]
        documents[-1] = (name, text[:cut])
        what = f"the last {len(text) - cut:,} characters of the last document"
    note = (
        f"Text: {data}. No --eval-data was given: {what} were kept back to measure on, "
        "and no run was trained on them."
    )
    return _up_to(documents, budget), held_out, [note]


def _load(source: str) -> Documents:
    rows = load_documents(source)
    return list(zip(rows["name"], rows["text"], strict=True))


def _write(documents: Documents, folder: Path, kind: str, as_table: bool) -> str:
    """Write one .jsonl file, or a folder of text files; return its name."""
    if as_table:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{kind}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for name, text in documents:
                file.write(json.dumps({"text": text, "name": name}) + "\n")
        return f"{kind}.jsonl"
    (folder / kind).mkdir(parents=True)
    for index, (name, text) in enumerate(documents):
        path = folder / kind / f"{index:03}-{Path(name).stem}.txt"
        path.write_bytes(text.encode("utf-8"))
    return kind


def _write_prompts(folder: Path, tokenizer: Any, text: str, block_size: int) -> list[str]:
    """Write the beginning of a text: once short, once longer than the training rows if it can be."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    folder.mkdir()
    names: list[str] = []
    for name, size in (("short", SHORT_PROMPT), ("long", 2 * block_size)):
        if size < len(ids) or not names:
            prompt = tokenizer.decode(ids[: min(size, len(ids))], clean_up_tokenization_spaces=False)
            (folder / f"{name}.txt").write_bytes(prompt.encode("utf-8"))
            names.append(f"{folder.name}/{name}.txt")
    return names
