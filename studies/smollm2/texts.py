"""Write what the rows of SmolLM2 train on and are measured on.

Training: novels, Python's enhancement proposals and chat in equal parts, piece by piece, of texts that the
data folder keeps apart from those measured on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from hf_linattn.cli.files import replacing

PIECE = 6000
"""Characters of a piece of text, some 1,500 tokens."""
PART = 5_400_000
"""Characters of each kind, some 1.3 million tokens."""
QUESTION = "What is gravity? Answer in three sentences."
TASKS = Path(__file__).parent / "tasks"


def prepare(data: Path, work: Path, tokenizer: Any) -> dict[str, Path]:
    """Write the texts that are not there yet; returns them by the names that measures.yaml has for them."""
    books, peps = data / "text" / "books", data / "text" / "peps"
    made = {name: work / "text" / f"{name}.jsonl" for name in ("train", "held_out")}
    made["chat"] = work / "text" / "chat.txt"
    made["tasks"] = work / "text" / "tasks"
    made["novel"], made["peps"] = books / "eval" / "Emma.md", peps / "eval"
    made["tasks"].mkdir(parents=True, exist_ok=True)
    for path in TASKS.glob("*.yaml"):
        content = path.read_text(encoding="utf-8").replace("{tasks}", str((data / "tasks").resolve()))
        _write(made["tasks"] / path.name, content)
    if not made["train"].exists():
        kinds = [
            _even(_pieces(sorted((books / "train").glob("*.*"))), PART),
            _even(_pieces(sorted(peps.glob("train_*.txt"))), PART),
            _even(_chats(data / "text" / "chat" / "train.jsonl", tokenizer), PART),
        ]
        _write(made["train"], _lines(list(chain.from_iterable(zip(*kinds, strict=False)))))
    if not made["held_out"].exists():
        texts = [made["novel"], *sorted(made["peps"].iterdir())[:2]]
        held_out = [path.read_text(encoding="utf-8")[PIECE:][:PIECE] for path in texts]
        held_out += list(_chats(data / "text" / "chat" / "held_out.jsonl", tokenizer))[:1]
        _write(made["held_out"], _lines(held_out))
    if not made["chat"].exists():
        messages = [{"role": "user", "content": QUESTION}]
        _write(
            made["chat"], tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    return made


def _pieces(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _chats(path: Path, tokenizer: Any) -> Iterator[str]:
    """Yield conversations as the model's template writes them, joined to pieces."""
    piece = ""
    rows = path.read_text(encoding="utf-8").strip()
    for line in rows.split("\n"):  # not at other line breaks, as splitlines does
        piece += tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        if len(piece) >= PIECE:
            yield piece
            piece = ""


def _even(pieces: Iterator[str], characters: int) -> list[str]:
    """Draw pieces until there are so many characters, the same in every run."""
    drawn, total = [], 0
    everything = list(pieces)
    random.Random(0).shuffle(everything)
    for piece in everything:
        if total >= characters:
            break
        drawn.append(piece)
        total += len(piece)
    return drawn


def _lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")
