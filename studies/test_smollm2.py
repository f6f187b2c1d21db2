"""The study on SmolLM2: commands that the parsers take, texts, the page that the stored figures give."""

import json
import shlex
import sys

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from hf_linattn.convert.arguments import build_parser as convert_parser
from hf_linattn.eval.bench.__main__ import build_parser as bench_parser
from hf_linattn.eval.generation.__main__ import build_parser as generation_parser
from hf_linattn.eval.harness.__main__ import build_parser as harness_parser
from hf_linattn.eval.perplexity.__main__ import build_parser as perplexity_parser
from hf_linattn.finetune.arguments import build_parser as finetune_parser
from hf_linattn.registry import parse
from studies.smollm2 import page, swap
from studies.smollm2.__main__ import MEASURES, ROWS, Machine, measuring, training
from studies.smollm2.figures import load
from studies.smollm2.outliers import round_linear_layers, rounded
from studies.smollm2.texts import prepare

PARSERS = {
    "convert": convert_parser,
    "finetune": finetune_parser,
    "perplexity": perplexity_parser,
    "harness": harness_parser,
    "generation": generation_parser,
    "bench": bench_parser,
}
NAMES = ("train", "held_out", "chat", "tasks", "novel", "peps")


def understood(words):
    if words[1].endswith("swap.py"):
        swap.build_parser().parse_args(words[2:])
    if words[1] == "-m":
        PARSERS[words[2].split(".")[-1]]().parse_args(words[3:])


@pytest.mark.parametrize("machine", [Machine(), Machine(gpu=True, batch=8)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_commands_of_every_row_are_understood(row, machine, tmp_path):
    texts = {name: tmp_path / name for name in NAMES}
    if row.training != "none":
        words = training(row, 1_000_000, tmp_path, texts, machine)
        understood(words)
        assert ("--cpu" in words) != (machine.gpu or row.training == "swap")
        if isinstance(row.patch, str):
            parse(row.patch, row.options or None)
    for name in row.asked:
        understood(measuring(name, tmp_path / "model", tmp_path, texts, tmp_path / "out", machine))


def test_every_measure_is_asked_for():
    assert {name for row in ROWS.values() for name in row.asked} == set(MEASURES)


def test_texts_are_the_same_each_time_and_mixed_in_equal_parts(data, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(data / "models" / "books-1m"))
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    first, second = (prepare(data, tmp_path / name, tokenizer) for name in ("a", "b"))
    content = first["train"].read_bytes()
    assert content == second["train"].read_bytes()
    sizes = [0, 0, 0]
    for index, line in enumerate(content.splitlines()):
        sizes[index % 3] += len(json.loads(line)["text"])
    assert max(sizes) / min(sizes) < 1.1
    assert all("{tasks}" not in path.read_text() for path in first["tasks"].iterdir())


def test_rounding_hurts_more_where_one_number_is_large():
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)
    spiked = x.clone()
    spiked[0, 0] = 1000
    assert (rounded(spiked) - spiked)[1:].abs().mean() > 20 * (rounded(x) - x).abs().mean()
    model = nn.Sequential(layer)
    model.get_output_embeddings = lambda: None
    exact = layer(x)
    round_linear_layers(model)
    assert 0 < (model(x) - exact).abs().max() < 0.1


def test_pages_show_the_stored_figures():
    tokens = int(shlex.split(page.PAGE.read_text(encoding="utf-8").split("--tokens")[1])[0])
    for path in (page.PAGE, page.FINDINGS, page.README):
        content = path.read_text(encoding="utf-8")
        assert page.renewed(content, load(), tokens) == content


def test_a_row_is_told_from_the_control_of_as_many_tokens():
    def novels(scale):
        return {str(n): scale * 10 for n in page.LENGTHS}

    def tasks(share):
        return {name: {"value": share, "stderr": 0.02} for name in (*page.CHOICES, "lambada")}

    figures = {
        "novels/control-100": novels(2.0),
        "novels/control-long-500": novels(1.0),
        "novels/h2o-measured-100": novels(2.1),
        "novels/h2o-long-500": novels(1.1),
        "tasks/control-100": tasks(0.5),
        "tasks/h2o-measured-100": tasks(0.4),
        "all_tasks/control-100": tasks(0.9),
    }
    rows = [page.Figures(figures, row, 100) for row in ROWS.values()]
    controls = {row.tokens: row for row in rows if row.row.name in ("control", "control-long")}
    lines = page.against(rows, controls).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert [row[:5] for row in cells] == [
        ["100", "1.050", "1.050", "1.050", "1.00"],
        ["500", "1.100", "1.100", "1.100", "1.00"],
    ]
    assert cells[0][5:] == ["-10.0", "80", "", "", ""]  # both of the first 500 items


def test_list_prints_the_commands(data, tmp_path, capsys, monkeypatch):
    from studies.smollm2 import __main__ as study

    (tmp_path / "model").symlink_to(data / "models" / "books-1m")
    monkeypatch.setattr(study, "prepare", lambda *_: {name: tmp_path / name for name in NAMES})
    monkeypatch.setattr(sys, "argv", ["study"])
    words = ["--data", str(data), "--work-dir", str(tmp_path), "--rows", "hybrid", "--list"]
    assert study.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(ROWS["hybrid"].asked)
    assert all(line.startswith("open") for line in lines)
