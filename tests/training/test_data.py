"""Reading, tokenizing and packing text."""

import json

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_linattn.data import document_separator, load_blocks, load_documents, pack_blocks, tokenize_documents
from hf_linattn.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def byte_tokenizer(**special):
    """One token per byte, 0-255 in the order of the byte-level alphabet; special tokens behind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8, **special)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (("one", "two"), "not tuple"),
        (iter(["one"]), "not list_iterator"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}),
            "choose one of its splits",
        ),
        ([], "the list of texts is empty"),
        (["one", 2], "holds int, not only strings"),
    ],
)
def test_other_sources_are_refused(source, message):
    with pytest.raises(DataError, match=message):
        load_documents(source)


def write_table(path, rows):
    table = datasets.Dataset.from_list(rows)
    writers = {".jsonl": table.to_json, ".parquet": table.to_parquet, ".csv": table.to_csv}
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        writers[path.suffix](path)


def test_text_file_is_one_document_with_unix_line_endings(tmp_path):
    path = tmp_path / "a.unknown"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\n")
    documents = load_documents(path)
    assert documents.column_names == ["name", "text"]
    assert documents[:] == {"name": ["a.unknown"], "text": ["one\ntwo\nthree\n\n"]}


def test_folder_gives_sorted_text_files_only(tmp_path):
    hidden = (".notes.txt", "a/._z.md", ".git/info.txt", ".cache/rows.jsonl")
    for name in ("b.txt", "a/z.md", "a/B.PY", "c.rst", "d.raw", "skip.bin", "empty.txt", *hidden):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    documents = load_documents(tmp_path / "texts")
    assert (
        list(documents["name"]) == list(documents["text"]) == ["a/B.PY", "a/z.md", "b.txt", "c.rst", "d.raw"]
    )


def test_a_folder_of_text_files_says_that_it_leaves_tables_and_packed_files_out(tmp_path):
    for name in ("README.md", "data/b.jsonl.gz", "data/a.parquet", "settings.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("about")
    with pytest.warns(UserWarning, match=r"without its other files \(data/a.parquet and 1 more\)"):
        assert list(load_documents(tmp_path)["name"]) == ["README.md"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_tables_give_a_document_per_row(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    write_table(path, [{"body": "NA", "n": 1}, {"body": "", "n": 2}, {"body": "two\nlines", "n": 3}])
    with pytest.warns(UserWarning, match="column 'body' is empty in 1 of 3 rows, which are left out"):
        documents = load_documents(path, column="body")
    assert list(documents["text"]) == ["NA", "two\nlines"]
    assert list(documents["name"]) == [f"{path}[0]", f"{path}[2]"]


def bad_sources(folder):
    (folder / "empty.txt").touch()
    (folder / "empty.jsonl").touch()
    datasets.Dataset.from_dict(
        {"text": []}, features=datasets.Features(text=datasets.Value("string"))
    ).to_parquet(folder / "none.parquet")
    (folder / "header.csv").write_text("text\n")
    (folder / "twice.csv").write_text("text,text\none,two\n")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "nothing").mkdir()
    (folder / "nothing" / ".hidden.txt").write_text("hidden")
    (folder / "rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    write_table(folder / "other.jsonl", [{"body": "a", "n": 1}])
    write_table(folder / "blank.jsonl", [{"text": ""}])


@pytest.mark.parametrize(
    ("source", "column", "message"),
    [
        ("", "text", "the path of the text is empty"),
        ("missing.txt", "text", "no such file or folder"),
        ("./missing", "text", "no such file or folder"),
        ("empty.txt", "text", "empty.txt is empty"),
        ("empty.jsonl", "text", "empty.jsonl is empty"),
        ("none.parquet", "text", "none.parquet has no rows"),
        ("header.csv", "text", "header.csv has no rows"),
        ("twice.csv", "text", "twice.csv has several columns 'text'"),
        ("/dev/null", "text", "/dev/null is neither a file nor a folder"),
        ("blank.jsonl", "text", "column 'text' of blank.jsonl is empty"),
        ("latin.txt", "text", "latin.txt is not UTF-8 text: byte 3"),
        ("rows.jsonl.gz", "text", "rows.jsonl.gz is packed: unpack it first"),
        ("nothing", "text", "no text in the folder nothing: looked for files ending in .txt"),
        ("broken.jsonl", "text", "cannot load the data 'broken.jsonl'"),
        ("other.jsonl", "text", "has no column 'text'; it has body, n"),
        ("other.jsonl", "n", "column 'n' of other.jsonl holds int64, not text"),
    ],
)
def test_unusable_sources_say_why_in_one_line(tmp_path, monkeypatch, source, column, message):
    monkeypatch.chdir(tmp_path)
    bad_sources(tmp_path)
    with pytest.raises(DataError) as caught:
        load_documents(source, column=column)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dataset_name_offline_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot load the data 'no-such-set:plain'"):
        load_documents("no-such-set:plain")


def test_tokens_are_the_bytes_without_special_tokens_or_warnings(tmp_path, capfd):
    (tmp_path / "a.txt").write_text("hello, longer than model_max_length", newline="")
    tokenizer = byte_tokenizer(bos_token="<s>")
    tokens = tokenize_documents(load_documents(tmp_path / "a.txt"), tokenizer)
    assert tokenizer.decode(tokens[0]["input_ids"]) == "hello, longer than model_max_length"
    assert len(tokens[0]["input_ids"]) == 35
    assert "maximum sequence length" not in capfd.readouterr().err


@pytest.mark.parametrize("separator", [None, 9])
@pytest.mark.parametrize("lengths", [(), (3,), (5, 0, 7, 1), (4, 4)], ids=str)
def test_packing_matches_joined_lists(lengths, separator):
    documents = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    stream = []
    for document in documents:
        if document:
            stream += ([] if separator is None else [separator]) + document
    want = [stream[start : start + 4] for start in range(0, len(stream) - 3, 4)]
    blocks = pack_blocks(documents, 4, separator)
    assert blocks.dtype == np.int32
    assert blocks.shape == (len(want), 4)
    assert blocks.tolist() == want


@pytest.mark.parametrize(
    ("special", "token", "text"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, "<s>", "BOS token '<s>'"),
        ({"eos_token": "</s>"}, "</s>", "EOS token '</s>'"),
        ({}, None, "without a separator"),
    ],
)
def test_separator_is_bos_else_eos_else_nothing(tmp_path, special, token, text):
    tokenizer = byte_tokenizer(**special)
    separator, sentence = document_separator(tokenizer)
    assert text in sentence
    assert separator == (None if token is None else tokenizer.convert_tokens_to_ids(token))
    (tmp_path / "a.txt").write_text("abcd")
    (tmp_path / "b.txt").write_text("efgh")
    blocks = load_blocks(tmp_path, tokenizer, 4)
    mark = [] if separator is None else [separator]
    stream = [*mark, *tokenizer("abcd")["input_ids"], *mark, *tokenizer("efgh")["input_ids"]]
    assert blocks.flatten().tolist() == stream[:8]


def test_text_shorter_than_a_block_says_how_long_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match=r"a\.txt holds 4 tokens, fewer than one block of 64"):
        load_blocks(tmp_path / "a.txt", byte_tokenizer(bos_token="<s>"), 64)
