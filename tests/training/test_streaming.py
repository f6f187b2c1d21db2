"""Streamed text: the blocks of text in memory, read no further than a run takes it, resumed to the byte."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers.chat import byte_tokenizer
from helpers.fixtures_finetune import (
    BASE,
    SHORT,
    finished,
    stable_rows,
    surroundings,
    weights_of,
    workplace,
)

from hf_linattn.convert import convert
from hf_linattn.data import BlockFile, documents, load_blocks, load_documents
from hf_linattn.errors import DataError
from hf_linattn.finetune.__main__ import main
from hf_linattn.training import loop
from hf_linattn.training.masked_lm import Masking

pytestmark = pytest.mark.usefixtures("surroundings")
TEXTS = ["one line\nand another\n" * 5, "", "two", "x" * 90]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def sources(tmp_path):
    """The same documents in every form."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    table = datasets.Dataset.from_dict({"text": TEXTS})
    table.to_json(tmp_path / "rows.jsonl")
    table.to_parquet(tmp_path / "rows.parquet")
    files = (folder, tmp_path / "rows.jsonl", tmp_path / "rows.parquet")
    return [*files, table, table.to_iterable_dataset(), TEXTS]


def test_streamed_blocks_are_those_in_memory(sources, tmp_path, monkeypatch):
    tokenizer = byte_tokenizer(bos_token="<s>")
    with pytest.warns(UserWarning, match="empty in 1 of 4 rows"):
        want = load_blocks(TEXTS, tokenizer, 16)
    monkeypatch.setattr(documents, "PIECE", 7)  # a file in pieces; bytes have no tokens across lines
    for source in sources:
        file = BlockFile(tmp_path / "blocks.bin")
        blocks = load_blocks(source, tokenizer, 16, stream=True, file=file)
        assert isinstance(blocks, np.memmap)
        assert not blocks.flags.writeable
        assert np.array_equal(blocks, want)
        assert np.array_equal(load_blocks(source, tokenizer, 16, stream=True, limit=3), want[:3])


def test_masked_blocks_too(sources):
    masking = Masking.of(
        byte_tokenizer(bos_token="<s>", eos_token="</s>", sep_token="[S]", mask_token="[M]"), 16, 0
    )
    with pytest.warns(UserWarning, match="empty in 1 of 4 rows"):
        want = masking.load_blocks(TEXTS)
    for source in sources:
        assert np.array_equal(masking.load_blocks(source, stream=True), want)


def test_no_more_is_read_than_is_taken(monkeypatch):
    read = []

    def rows():
        for number in range(10**9):
            read.append(number)
            yield {"body": "some text", "n": number}

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.IterableDataset.from_generator(rows)

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    blocks = load_blocks("big-set:plain", byte_tokenizer(), 9, column="body", stream=True, limit=20)
    assert blocks.shape == (20, 9)
    assert asked == [(("big-set", "plain"), {"split": "train", "streaming": True})]
    assert len(read) < 20_000
    with pytest.raises(DataError, match=r"big-set has no column 'text'; it has body, n"):
        load_blocks("big-set", byte_tokenizer(), 9, stream=True)
    with pytest.raises(DataError, match=r"column 'n' of big-set\[0\] holds int, not text"):
        load_blocks("big-set", byte_tokenizer(), 9, column="n", stream=True)
    with pytest.raises(DataError, match="the dataset is streamed"):
        load_documents(load_dataset())


def test_errors_are_those_of_text_in_memory(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "short.txt").write_text("abc")
    for name, message in (
        ("latin.txt", "not UTF-8 text"),
        ("broken.jsonl", "cannot load the data"),
        ("short.txt", "holds 3 tokens, fewer than one block of 64"),
    ):
        file = BlockFile(tmp_path / "blocks.bin")
        with pytest.raises(DataError, match=message) as caught:
            load_blocks(tmp_path / name, byte_tokenizer(), 64, stream=True, file=file)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("blocks.bin*"))


def test_a_run_over_all_the_text_is_the_run_in_memory_to_the_byte(finished):
    """10 steps of 4 rows take fewer rows than there are: as many steps as blocks are an epoch."""
    argv = [*SHORT, "--data", "eval.txt", "--max-steps", "12"]  # 40 blocks at most, and fewer in the text
    assert main([*argv, "--output-dir", "memory"]) == 0
    assert main([*argv, "--streaming", "--output-dir", "streamed"]) == 0
    assert weights_of("streamed") == weights_of("memory")
    assert stable_rows("streamed") == stable_rows("memory")
    assert not Path("streamed/blocks.bin").exists()


def test_a_run_that_was_cut_off_goes_on_with_the_text_that_it_began_with(workplace, monkeypatch):
    argv = [*SHORT, "--streaming", "--checkpoint-every", "3", "--resume"]
    assert main([*argv, "--output-dir", "stream-whole"]) == 0
    assert json.loads(Path("stream-whole/results.json").read_text())["blocks"] == 40
    step = loop.TrainingLoop._train_step

    def interrupted(self):
        if self.step == 8:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(loop.TrainingLoop, "_train_step", interrupted)
        assert main([*argv, "--output-dir", "stream-cut"]) == 130
    assert Path("stream-cut/blocks.bin").stat().st_size == 40 * 32 * 4
    text = Path("train.txt").read_bytes()
    try:
        Path("train.txt").write_text("another text " * 200)
        assert main([*argv, "--output-dir", "stream-cut"]) == 0
    finally:
        Path("train.txt").write_bytes(text)
    assert weights_of("stream-cut") == weights_of("stream-whole")
    assert stable_rows("stream-cut") == stable_rows("stream-whole")


def test_a_large_text_is_streamed_without_being_asked_for(workplace, monkeypatch):
    assert not documents.streams("train.txt")
    assert not documents.streams("a-dataset:by-name")
    monkeypatch.setattr(documents, "STREAM_ABOVE", 1000)
    assert documents.streams("train.txt")
    assert documents.streams(".")
    assert main([*BASE, "--max-steps", "2", "--output-dir", "large"]) == 0
    assert json.loads(Path("large/results.json").read_text())["blocks"] == 8


def test_convert_takes_a_stream(workplace, tmp_path):
    table = datasets.Dataset.from_dict({"text": [Path("train.txt").read_text()]})
    model = convert(
        "model", table.to_iterable_dataset(), patch="elu1", output_dir=str(tmp_path / "out"),
        stages="distill", distill_tokens=256, block_size=32, batch_size=4, no_dropout=True, cpu=True,
    )  # fmt: skip
    assert model.config.model_type == "llama"
    assert json.loads((tmp_path / "out/distill/results.json").read_text())["blocks"] == 8
