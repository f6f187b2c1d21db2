"""The diagnose command, its files, and their section in the report."""

import csv
import io
import json
import re
from base64 import b64decode

import numpy as np
import pytest
import torch
from helpers.fixtures_demo import SENTENCE, save_model
from helpers.fixtures_report import comparison
from helpers.pages import Page
from helpers.paths import BASE, ROOT
from PIL import Image
from transformers import AutoTokenizer

from hf_linattn import from_pretrained, patch_model
from hf_linattn.eval.diagnose import __main__ as command
from hf_linattn.eval.diagnose import plot
from hf_linattn.eval.diagnose.measure import diagnose
from hf_linattn.eval.diagnose.outputs import read
from hf_linattn.eval.report import __main__ as report
from hf_linattn.ops.dispatch import kernels

FILES = {"diagnose.json", "diagnose.csv", "matrices.npz"}
PICTURES = {"heads.png", "entropy.png", "attention.png", "activations.png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SENTENCE * 5, encoding="utf-8")
    return path


def arguments(model, data, output, *extra):
    known = ["--model", str(model), "--data", str(data), "--output-dir", str(output)]
    return [*known, "--length", "32", "--windows", "2", *map(str, extra)]


@pytest.fixture(scope="module")
def results(folder, text, tmp_path_factory):
    """A folder of two diagnoses, with and without elu1."""
    out = tmp_path_factory.mktemp("out")
    assert command.main(arguments(folder, text, out / "b-own")) == 0
    assert command.main(arguments(folder, text, out / "a-elu1", "--patch", "elu1")) == 0
    return out


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes longer than everything else here; two tests look at the pictures."""
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, format="png")
    files = {"svg": b"<svg/>", "png": file.getvalue()}
    monkeypatch.setattr(plot, "_drawn", lambda *about, format, **form: files[format])


@pytest.mark.usefixtures("no_pictures")
def test_command_on_the_base_model(tmp_path, capsys):
    text = ROOT / "tests" / "attention" / "test_generate.py"
    assert command.main(arguments(BASE, text, tmp_path / "out", "--patch", "softmax1")) == 0
    shown = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "out" / "diagnose.json").read_text())
    assert len(shown) == 2 + len(found["layers"])
    assert all("softmax1" in line for line in shown[1:-1])
    assert shown[-1].startswith("2 windows of 32 tokens")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES | PICTURES
    assert all((tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in PICTURES)
    assert found["label"] == "base softmax1"
    assert found["kernels"] == kernels()
    assert found["threads"] == torch.get_num_threads()
    assert 0 < found["heads"][0]["mass"] < 1
    assert found["command"].endswith("--patch softmax1")
    # the file says what the function finds on the same windows
    tokenizer, model = AutoTokenizer.from_pretrained(BASE), from_pretrained(BASE, dtype=torch.float32)
    ids = torch.tensor([tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][:64]]).view(2, 32)
    assert found["windows"] == 2
    again = diagnose(patch_model(model, "softmax1"), ids, tokenizer=tokenizer)
    assert again.to_dict().items() <= found.items()


def test_files_are_read_back(results):
    content, diagnosis, matrices = read(results / "b-own")
    assert diagnosis.to_dict() == {key: content[key] for key in diagnosis.to_dict()}
    assert list(matrices) == ["0:0", "0:1", "1:0", "1:1"]
    assert matrices["1:1"].shape == (32, 32)
    assert matrices["1:1"].sum(1) == pytest.approx(np.ones(32), abs=1e-5)
    with (results / "b-own" / "diagnose.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert float(rows[3]["entropy"]) == diagnosis.heads[3].entropy
    assert rows[0]["module"] == "model.layers.0.self_attn"
    assert all(len(top["tokens"]) == 2 for head in diagnosis.heads for top in head.top)


def test_window_bos_and_named_heads(folder, text, tmp_path):
    extra = ("--bos", "window", "--heads", "1:1,0:0")
    assert command.main(arguments(folder, text, tmp_path, *extra)) == 0
    _, diagnosis, matrices = read(tmp_path)
    assert list(matrices) == ["1:1", "0:0"]
    first = [top["tokens"] for head in diagnosis.heads for top in head.top if top["position"] == 0]
    assert all(tokens == ["<s>", "<s>"] for tokens in first)


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--length", "0"), 2, "at least 1"),
        (("--heads", "1-2"), 2, "LAYER:HEAD"),
        (("--options", "{}"), 2, "belongs to --patch"),
        (("--patch", "logn", "--options", "[1]"), 2, "JSON object"),
        (("--length", "4096"), 1, "0 of 1 documents reach 4096 tokens"),
        (("--length", "3"), 1, "4 tokens"),
        (("--data", "/nowhere.txt"), 1, "no such file"),
        (("--model", "/nowhere"), 1, "no such folder"),
        (("--patch", "nosuch"), 1, "unknown patch 'nosuch'"),
        (("--heads", "7:0"), 1, "no head 7:0: the model has 2 layers with up to 2 heads"),
    ],
)
def test_bad_commands(folder, text, tmp_path, capsys, extra, status, words):
    try:
        code = command.main(arguments(folder, text, tmp_path / "out", *extra))
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == status
    assert words in error
    assert status == 2 or error.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--patch elu1" in shown
    assert "docs/diagnose.md" in shown


def test_report_shows_diagnoses(results, tmp_path):
    output = tmp_path / "report.html"
    assert report.main(["--diagnose", str(results), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    page = Page(text)
    assert "http" not in text
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert len(page.alts) == 2 * 4
    assert all(len(alt) > 30 for alt in page.alts)
    assert "What the attention does" in page.text
    assert "All numbers" not in page.text  # nothing of it was measured
    own = page.text.index("spreads its attention")
    assert "as linear attention must be" not in page.text[:own]
    assert "rank above 8 of 16: within the 8 dimensions of a head, as linear attention must be" in page.text
    assert page.text.count("python -m hf_linattn.eval.diagnose") == 2
    tables = re.findall(r"<tbody>.*?</tbody>", text, re.DOTALL)
    assert len(tables) == 1
    rows = re.findall(r'<th scope="row".*?>(.*?)</th>', tables[0])
    assert [row.split()[-1] for row in rows][1] == "elu1"  # the model's own attention comes first
    for link in page.links:
        assert b"<svg" in b64decode(link.removeprefix("data:image/svg+xml;base64,"))[:400]


@pytest.mark.usefixtures("no_pictures")
def test_report_beside_other_results(results, tmp_path):
    comparison(tmp_path)
    plain, both = tmp_path / "plain.html", tmp_path / "both.html"
    known = [str(tmp_path / "runs"), str(tmp_path / "perplexity")]
    assert report.main([*known, "--output", str(plain)]) == 0
    one = ["--diagnose", str(results / "a-elu1"), "--diagnose", str(results / "b-own")]
    assert report.main([*known, *one, "--output", str(both)]) == 0
    assert "What the attention does" not in Page(plain.read_text()).text
    text = Page(both.read_text()).text
    for heading in ("What the attention does", "All numbers", "What these numbers mean"):
        assert heading in text


@pytest.mark.usefixtures("no_pictures")
def test_report_refuses(results, folder, text, tmp_path, capsys):
    def refused(reason, *extra):
        assert report.main(["--output", str(tmp_path / "x.html"), *map(str, extra)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert reason in error
        assert not (tmp_path / "x.html").exists()

    refused("holds no results", "--diagnose", tmp_path)
    refused("nothing to report")
    refused("hold diagnoses only", "--diagnose", results, "--results", tmp_path / "r.json")
    assert command.main([*arguments(folder, text, tmp_path / "other"), "--length", "16"]) == 0
    capsys.readouterr()
    refused("different --length", "--diagnose", results, "--diagnose", tmp_path / "other")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "diagnose.json").write_text('{"format": "else"}')
    refused("holds no diagnosis that can be read", "--diagnose", broken)


@pytest.mark.usefixtures("no_pictures")
def test_diagnoses_are_recognised_among_folders(results, tmp_path, capsys):
    output = tmp_path / "report.html"
    assert report.main([str(results), "--output", str(output)]) == 0
    page = Page(output.read_text())
    assert "What the attention does" in page.text
    assert "All numbers" not in page.text  # there is no row to show
    assert report.main([str(results), "--output", str(output), "--results", str(tmp_path / "r.json")]) == 1
    assert "hold diagnoses only" in capsys.readouterr().err
