"""A teacher's top predictions of every token, kept on the disk: a second conversion needs no teacher.

    teacher.json      what they are of: teacher, tokenizer, block size; their number and sizes
    rows.bin          a digest of each row of token ids, in the order of the predictions
    predictions.bin   row after row, token after token: K ids, K + 1 log-probabilities (float16)
    done.bin          a byte for each batch of rows, 1 where its predictions are there

Rows are found by their tokens, so a run may take them in any order, and fewer of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_linattn.cli.files import read_json, replacing, write_json, writing
from hf_linattn.data import token_ids
from hf_linattn.errors import TrainingError
from hf_linattn.finetune.model import load_config
from hf_linattn.training.divergence import TopPredictions, top_predictions
from hf_linattn.training.head import logits_in_chunks, predict
from hf_linattn.training.loop import to_device
from hf_linattn.training.objectives import CACHELESS

TOP = 64
"""Tokens that are kept of each prediction."""

DIGEST = 16
"""Bytes of a row's digest."""

RECORD = "teacher.json"
FILES = ROWS, PREDICTIONS, DONE = ("rows.bin", "predictions.bin", "done.bin")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "config.json")


class Rows:
    """Rows of token ids `[N]` by their digests, each once; where they come from stays where it is."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[NDArray[np.int32], int]] = {}

    def add(self, blocks: NDArray[np.int32], row_ids: Iterable[int]) -> None:
        """Add rows of blocks `[blocks, N]`."""
        for row_id in row_ids:
            self._places.setdefault(_digest(token_ids(blocks[row_id])), (blocks, row_id))

    def digests(self) -> list[bytes]:
        """List the digests in order."""
        return list(self._places)

    def take(self, digests: Iterable[bytes]) -> NDArray[np.int32]:
        """Read the token ids of rows, `[B, N]`."""
        places = [self._places[digest] for digest in digests]
        return token_ids(np.stack([blocks[row_id] for blocks, row_id in places]))


class CachedTeacher:
    """Read a teacher's predictions from a folder: token ids `[B, N]` -> `TopPredictions`.

    Attributes:
        top: tokens of each prediction.
    """

    def __init__(self, folder: Path) -> None:
        record = read_json(folder / RECORD)
        self.top: int = record["top"]
        self._slots = {digest: slot for slot, digest in enumerate(_read_digests(folder))}
        shape = (len(self._slots), record["block size"])
        self._predictions = np.memmap(folder / PREDICTIONS, _token_dtype(record), "r", shape=shape)

    def __call__(self, input_ids: Tensor) -> TopPredictions:
        """Look rows up that `fill_cache` was given."""
        rows = input_ids.to("cpu", torch.int32).numpy()
        found = self._predictions[[self._slots[_digest(row)] for row in rows]]
        ids = torch.from_numpy(found["ids"].astype(np.int64)).to(input_ids.device)
        log_probs = torch.from_numpy(found["log_probs"].astype(np.float32)).to(input_ids.device)
        return TopPredictions(ids, log_probs.log_softmax(-1))  # rounded ones do not sum to 1


def fill_cache(
    folder: Path,
    key: dict[str, Any],
    rows: Rows,
    load_teacher: Callable[[], nn.Module],
    accelerator: Accelerator,
    batch_size: int,
) -> None:
    """Let a teacher predict the rows that a run takes, unless the folder has them; goes on after a kill.

    Args:
        folder: of the predictions.
        key: "teacher", "tokenizer", "block size" and "precision"; the last may differ once all is there.
        rows: that the run takes.
        load_teacher: loads it, where something is missing.
        accelerator: of this process, which takes its share of the rows.
        batch_size: rows of a forward pass, where the folder is new.

    Raises:
        TrainingError: the folder holds predictions of something else, or the disk has no room for these.
    """
    if accelerator.is_main_process and (folder / RECORD).exists():
        _check(folder, key, rows)
    accelerator.wait_for_everyone()
    if _complete(folder):
        return
    teacher = load_teacher().to(accelerator.device)
    if accelerator.is_main_process and not (folder / RECORD).exists():
        with torch.no_grad():
            first = to_device(rows.take(rows.digests()[:1])[:, :1], accelerator)
            vocabulary = next(logits_in_chunks(predict(teacher, first, **CACHELESS))).shape[-1]
        _create(folder, key, rows, vocabulary, batch_size)
    accelerator.wait_for_everyone()
    _fill(folder, rows, teacher, accelerator)
    accelerator.wait_for_everyone()


def _check(folder: Path, key: dict[str, Any], rows: Rows) -> None:
    """See that a folder's predictions are those that a run needs.

    Raises:
        TrainingError: they are of something else, or damaged.
    """
    record, needed = read_json(folder / RECORD), rows.digests()
    advice = f"give --cache-teacher another folder, or delete {folder}"
    if _sizes(folder, record) != [
        (folder / name).stat().st_size for name in FILES if (folder / name).exists()
    ]:
        raise TrainingError(f"--cache-teacher {folder} is damaged: {advice}")
    held, complete = _read_digests(folder), _complete(folder)
    names = [name for name in key if record[name] != key[name] and not (complete and name == "precision")]
    if names:
        raise TrainingError(f"--cache-teacher {folder} was made with another {', '.join(names)}: {advice}")
    known = len(set(needed).intersection(held))
    if known < len(needed):
        raise TrainingError(
            f"--cache-teacher {folder} holds {known} of the {len(needed)} rows that this run takes: it was "
            f"made with another text, --eval-data, --seed or fewer tokens. To make one for this run {advice}"
        )
    if not complete and held != needed:
        raise TrainingError(
            f"--cache-teacher {folder} was begun by another run and is not complete: end that run first "
            f"(--resume), or {advice}"
        )


def _create(folder: Path, key: dict[str, Any], rows: Rows, vocabulary: int, batch_size: int) -> None:
    """Make the files, empty; the record comes last.

    Raises:
        TrainingError: the disk has no room.
    """
    digests = rows.digests()
    record = {**key, "top": min(TOP, vocabulary - 1), "vocabulary": vocabulary}
    record |= {"rows": len(digests), "batch": batch_size}
    a_token, tokens = _token_dtype(record).itemsize, len(digests) * key["block size"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    need = f"{tokens * a_token / 1e6:,.1f} MB ({tokens:,} tokens x {a_token} bytes)"
    if tokens * a_token > free:
        raise TrainingError(
            f"--cache-teacher {folder} needs {need}, and its disk has {free / 1e6:,.1f} MB: give a folder on "
            "another disk or fewer tokens, or leave it out"
        )
    sys.stderr.write(f"predictions of the original: {need} in {folder}\n")
    for name, size in zip(FILES, _sizes(folder, record), strict=True):
        with replacing(folder / name) as partial, partial.open("wb") as file:
            file.write(b"".join(digests) if name == ROWS else b"")
            file.truncate(size)
    write_json(folder / RECORD, record)


@torch.no_grad()
def _fill(folder: Path, rows: Rows, teacher: nn.Module, accelerator: Accelerator) -> None:
    """Predict this process's share of the batches that are missing, and mark each behind its predictions."""
    record, digests = read_json(folder / RECORD), _read_digests(folder)
    batch, dtype = record["batch"], _token_dtype(record)
    done = (folder / DONE).read_bytes()
    share = range(accelerator.process_index, len(done), accelerator.num_processes)
    with (
        writing(folder),
        (folder / PREDICTIONS).open("r+b") as file,
        (folder / DONE).open("r+b") as marks,
        tqdm(total=len(share), desc="teacher", unit="batch", disable=not accelerator.is_main_process) as bar,
    ):
        for number in share:
            if not done[number]:
                ids = to_device(rows.take(digests[number * batch : (number + 1) * batch]), accelerator)
                with accelerator.autocast():
                    predictions = predict(teacher, ids, **CACHELESS)
                tokens = np.empty(ids.numel(), dtype)
                start = 0
                for logits in logits_in_chunks(predictions):
                    top = top_predictions(logits, record["top"])
                    part = tokens[start : (start := start + len(logits))]
                    part["ids"] = top.ids.cpu()
                    part["log_probs"] = top.log_probs.clamp_min(torch.finfo(torch.float16).min).half().cpu()
                file.seek(number * batch * record["block size"] * dtype.itemsize)
                file.write(tokens.tobytes())
                _mark(file, marks, number)
            bar.update()


def _mark(file: Any, marks: Any, number: int) -> None:
    """Say that a batch is there, once it is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    marks.seek(number)
    marks.write(b"\1")
    marks.flush()


def _sizes(folder: Path, record: dict[str, Any]) -> list[int]:
    """Bytes of each of `FILES`.

    Raises:
        TrainingError: the record is none of ours.
    """
    try:
        rows, length, batch = record["rows"], record["block size"], record["batch"]
        return [rows * DIGEST, rows * length * _token_dtype(record).itemsize, -(-rows // batch)]
    except KeyError as error:
        raise TrainingError(f"{folder / RECORD} has no entry {error}: give another folder") from error


def _complete(folder: Path) -> bool:
    return (folder / RECORD).exists() and 0 not in (folder / DONE).read_bytes()


def _read_digests(folder: Path) -> list[bytes]:
    joined = (folder / ROWS).read_bytes()
    return [joined[start : start + DIGEST] for start in range(0, len(joined), DIGEST)]


def _token_dtype(record: dict[str, Any]) -> np.dtype[Any]:
    """What is kept of a token."""
    top, ids = record["top"], "<u2" if record["vocabulary"] <= 2**16 else "<i4"
    return np.dtype([("ids", ids, (top,)), ("log_probs", "<f2", (top + 1,))])


def _digest(row: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(row.astype("<i4").tobytes(), digest_size=DIGEST).digest()


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identify a tokenizer by its tokens and their ids."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def weights_digest(name: str) -> str:
    """Identify a model: by its weights and config in a folder or file, on the Hub by name and commit."""
    path = Path(name).expanduser()
    files = [path] if path.is_file() else sorted({file for glob in WEIGHTS for file in path.glob(glob)})
    if not files:
        return f"{name} {getattr(load_config(name), '_commit_hash', None)}"
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while piece := content.read(2**24):
                digest.update(piece)
    return digest.hexdigest()
