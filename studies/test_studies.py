"""The study: commands that the package's parsers take, the page made of results, the plans of kept layers."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from real_data import DATA, needs_data
from transformers import AutoTokenizer

from hf_linattn.convert import ConvertArguments
from hf_linattn.convert import build_parser as convert_parser
from hf_linattn.errors import DataError
from hf_linattn.eval import branches, compare, diagnose, generation, layers, perplexity, recall
from hf_linattn.finetune import FinetuneArguments
from hf_linattn.finetune import build_parser as finetune_parser
from hf_linattn.registry import parse

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import study
import study_figures
from study_bases import BASES
from study_commands import training_words
from study_kept import kept_rows, layers_words
from study_page import MARKS, page, write_page
from study_place import Place, slot
from study_plan import TABLES, rows_of
from study_recalling import lone_tokens, recalling
from study_row import last_stage, steps_of
from study_scale import measured, scores
from study_tables import spread
from study_texts import prepare

ROWS = {f"{name}: {row.name}": (name, row) for name, table in TABLES.items() for row in table}
TOKENS = {"long": 1e7, "recall-long": 1e7, "scratch": 4e6}
MEASURES = {
    "perplexity": perplexity.build_parser,
    "generation": generation.build_parser,
    "recall": recall.build_parser,
    "branches": branches.build_parser,
    "diagnose": diagnose.build_parser,
}


@pytest.fixture
def place(tmp_path):
    return Place(BASES["recall"], tmp_path / "data", tmp_path / "work")


@pytest.mark.parametrize(("table", "row"), ROWS.values(), ids=ROWS)
def test_commands_of_every_row_are_understood(table, row, place):
    if row.how == "none":
        parse(row.patch or "softmax", row.options)
    else:
        words = training_words(place, row, 0)[3:]
        made = {"finetune": FinetuneArguments, "convert": ConvertArguments}[row.how]
        parser = {"finetune": finetune_parser, "convert": convert_parser}[row.how]()
        arguments = made(**vars(parser.parse_args(words)))
        for one in arguments.patch.values() if isinstance(arguments.patch, dict) else [arguments.patch]:
            if one is not None:
                parse(*one) if isinstance(one, list) else parse(one, arguments.options or {})
        if row.how == "convert":
            stages = arguments.chosen_stages()
            assert stages[-1] == last_stage(row)
            tokens = sum(arguments.tokens(stage) for stage in stages)
        else:
            tokens = arguments.max_steps * arguments.batch_size * arguments.block_size
        assert tokens == pytest.approx(TOKENS.get(table, 1e6), rel=0.01)
        assert steps_of(row) == pytest.approx(tokens / (arguments.batch_size * 512), rel=0.03)
    for what, words in study.measurements(place, row, 0):
        arguments = MEASURES[what]().parse_args(words[3:])
        given = (arguments.patch or []) if what == "recall" else []
        for entry in [given] if isinstance(given, str) else given:
            patch, options, rope = compare.parse_entry(entry)
            assert (patch, options, rope) == (row.patch or "softmax", row.options, row.rope)


def test_jobs_wait_for_jobs_that_are_there(tmp_path):
    argv = ["--data", str(tmp_path), "--work-dir", str(tmp_path)]
    args = study.build_parser().parse_args(argv)
    jobs = study.all_jobs([Place(base, tmp_path, tmp_path) for base in BASES.values()], args)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for number, job in enumerate(jobs):
        assert set(job.after) <= set(names[:number])
    assert "recall layers" in names
    assert "recall-long layers" not in names  # its row is chosen already
    assert "scale" in names


def test_main_rows_have_three_seeds_on_the_first_base_only():
    control = ROWS["lengths: control"][1]
    assert control.seeds(BASES["books"]) == (0, 1, 2)
    assert control.seeds(BASES["stories"]) == (0,)
    assert ROWS["lengths: taylor"][1].seeds(BASES["books"]) == (0,)
    assert {row.name for row in rows_of(BASES["stories"], ["lengths"]) if not row.main} == {"original"}


def write(path, content):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def curve(factor):
    rows = []
    for power in range(7):
        length = 512 << power
        buckets = [{"start": 1, "end": 64, "perplexity": factor}, {"start": 64, "end": 512, "perplexity": 2}]
        rows.append({"length": length, "perplexity": factor * (1 + power), "buckets": buckets})
    return {"complete": True, "rows": rows}


def test_page_compares_with_the_mean_of_the_controls(tmp_path):
    place = Place(BASES["books"], tmp_path, tmp_path)
    for name, factor in (("original", 20), ("control-0", 10), ("control-1", 30), ("elu1-0", 50)):
        write(place.folder / "perplexity" / name / "results.json", curve(factor))
    write(place.folder / "perplexity" / "hedgehog-0" / "results.json", {**curve(1), "complete": False})
    both = [{"model": "both", "perplexity": 20.0}, {"model": "linear", "perplexity": 99.5}]
    hybrid = place.folder / "branches" / "window-hedgehog-0" / "results.json"
    write(hybrid, {"complete": True, "rows": both})
    for name in ("window-sinks", "window-64-0"):  # windows alone are no hybrids
        write(place.folder / "perplexity" / name / "results.json", curve(1))
    text = page(tmp_path, tmp_path, study_figures.collect({}, tmp_path))
    assert "|  | both | linear |\n|---|---|---|\n| `window+hedgehog` (64), all weights | 20 | 99.5 |" in text
    control = next(line for line in text.splitlines() if line.startswith("| control"))
    assert control.startswith("| control: the original, fine-tuned | 20 (10 to 30) | 40 (20 to 60) |")
    assert control.endswith("| 1 (0.5 to 1.5) | 7 (7 to 7) | 2 |")
    elu1 = next(line for line in text.splitlines() if line.startswith("| `elu1` | 50 |"))
    assert elu1.endswith("| 350 | 2.5 | 7 | 1 |")
    assert "| `hedgehog` |" not in text
    assert "| pure linear, any map, x control | 1.15 | 2.500 | `elu1` | missed by 1.350 |" in text
    assert "| pure linear, 64x over 1x of the same model | 1.10 | 7.000 | `elu1` | missed by 5.900 |" in text
    assert "| window hybrid (64), x control |" not in text
    name = "`window+hedgehog` (size 64)"
    assert f"| window hybrid (64), its linear branch alone over both | 1.50 | 4.975 | {name}" in text
    assert "| window hybrid (64) where that is at most 1.5, x control |" not in text
    carrying = place.folder / "branches" / "window-gated-hedgehog-0" / "results.json"
    write(carrying, {"complete": True, "rows": [{**both[0], "perplexity": 90.0}, both[1]]})
    write(place.folder / "perplexity" / "window-gated-hedgehog-0" / "results.json", curve(30))
    write(place.folder / "perplexity" / "window-hedgehog-0" / "results.json", curve(22))
    text = page(tmp_path, tmp_path, study_figures.collect({}, tmp_path))
    assert f"| window hybrid (64), x control | 1.01 | 1.100 | {name} | missed by 0.090 |" in text
    assert "| window hybrid (64) where that is at most 1.5, x control | 1.01 | 1.500 | `window+gated`" in text
    assert str(tmp_path) not in text


def recall_found():
    row = {"task": "induction", "length": 512, "chance": 0.001}
    labels = ("original", "patched")
    rows = [{**row, "model": labels[n // 2], "accuracy": n / 4} for n in range(4)]
    return {"complete": True, "models": [{"label": label} for label in labels], "rows": rows}


def test_figures_go_on_without_the_work_folder(tmp_path):
    args = study.build_parser().parse_args(["--data", str(tmp_path), "--work-dir", str(tmp_path / "work")])
    place = Place(BASES["recall"], tmp_path, tmp_path / "work")
    row = TABLES["kept"][2]
    write(place.measured("perplexity", row, 0) / "results.json", curve(1 / 3))
    write(place.measured("recall", row, 0) / "results.json", recall_found())
    write(place.trained(row, 0) / "results.json", {"steps": 245})  # no measurement
    figures = study_figures.collect({}, place.work)
    assert sorted(figures) == ["recall/perplexity/hedgehog-0", "recall/recall/hedgehog-0"]
    assert figures["recall/perplexity/hedgehog-0"]["lengths"]["512"] == 0.333333
    assert figures["recall/recall/hedgehog-0"] == {
        "original": {"induction": {"512": 0.125}},
        "row": {"induction": {"512": 0.625}},
        "chance": {"induction": {"512": 0.001}},
    }

    kept = tmp_path / "figures.json"
    study_figures.write(kept, figures)
    shutil.rmtree(place.work)
    place = replace(place, figures=study_figures.load(kept))
    assert place.figures == figures

    def finished():
        return {job.name: job.finished() for job in study.jobs_for(place, [row], args)}

    assert finished()["recall perplexity hedgehog-0"]
    assert not finished()["recall generation hedgehog-0"]
    assert not finished()["recall train hedgehog-0"]  # its text is still to be written
    figures |= {"recall/generation/hedgehog-0": {}}
    place = replace(place, figures=figures)
    assert not finished()["recall train hedgehog-0"]  # its layers are still to be ranked
    figures["recall/layers"] = {}
    assert all(finished().values())


@pytest.mark.parametrize("content", ["not json", "[1]", '{"scale": 1}'])
def test_figures_of_something_else_are_refused(content, tmp_path, capsys):
    kept = tmp_path / "page.json"
    kept.write_text(content)
    argv = ["--data", str(tmp_path), "--work-dir", str(tmp_path), "--output", str(tmp_path / "page.md")]
    assert study.main([*argv, "--no-run"]) == 1
    assert "does not hold the figures of the study" in capsys.readouterr().err
    assert kept.read_text() == content
    assert not (tmp_path / "page.md").exists()


def test_words_around_the_tables_stay(tmp_path):
    path = tmp_path / "results.md"
    begin, end = MARKS
    write_page(path, "first")
    assert path.read_text() == f"# What conversion keeps\n\n{begin}\n\nfirst\n{end}\n"
    path.write_text(f"mine {begin} old {end} mine too\n")
    write_page(path, "second")
    assert path.read_text() == f"mine {begin}\n\nsecond\n{end} mine too\n"
    path.write_text("mine alone")
    with pytest.raises(DataError, match="has no lines"):
        write_page(path, "third")
    assert path.read_text() == "mine alone"


def test_layers_kept_by_several_methods_are_one_row(place, capsys):
    assert kept_rows(place) == {}
    layers.build_parser().parse_args(layers_words(place)[3:])
    points = [("kl", [2], "softmax", 1), ("even", [3], "softmax", 1), ("recall", [2], "softmax", 1)]
    points += [("kl", [2], "nope", 1), ("kl", [], "softmax", 0), ("even", [1, 4], "softmax", 2)]
    tradeoff = [{"curve": c, "kept": kept, "count": n, "key": [own, kept]} for c, own, kept, n in points]
    found = {"layers": [{"number": n} for n in range(6)], "tradeoff": tradeoff}
    path = place.folder / "layers" / "results.json"
    write(path, {"complete": False, "layers": []})
    assert study_figures.collect({}, place.work) == {}  # still being ranked
    path.write_text(json.dumps(found))
    place = replace(place, figures=study_figures.collect({}, place.work))
    rows = kept_rows(place)
    better = ("tuned", "gated", "window", "nope", "nope-logn", "nope-both", "nope-logn-both")
    assert [*rows] == ["kept-2", *(f"kept-2-{name}" for name in better), "kept-3", "kept-1-4"]
    words = training_words(place, rows["kept-2-nope-logn"], 0)[3:]
    assert ConvertArguments(**vars(convert_parser().parse_args(words))).patch["2"] == "nope+logn"
    assert rows["kept-2-window"].told == "softmax in 2, `window+gated` (hedgehog) elsewhere"
    words = training_words(place, rows["kept-2-gated"], 0)[3:]
    plan = ConvertArguments(**vars(convert_parser().parse_args(words))).patch
    assert plan["0,1,3,4,5"][0] == "gated"
    assert plan["0,1,3,4,5"][1]["feature_map"] == "taylor2"
    assert rows["kept-2"].patch == {"0,1,3,4,5": "hedgehog"}
    assert rows["kept-2"].told == "softmax in 2: kl, recall"
    words = training_words(place, rows["kept-1-4"], 0)[3:]
    assert ConvertArguments(**vars(convert_parser().parse_args(words))).patch == {"0,2,3,5": "hedgehog"}
    assert slot(rows["kept-2"], 0) == "kept-2-0"
    words = ["--data", "d", "--work-dir", str(place.work), "--base", "recall", "--tables", "kept", "--list"]
    assert study.main([*words, "--rows", "kept-2-gated"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in listed] == [
        "hf_linattn.convert",
        *(f"hf_linattn.eval.{name}" for name in ("perplexity", "generation", "recall")),
    ]
    assert all("kept-2-gated" in line for line in listed)


def test_a_missing_base_says_what_makes_it(place):
    with pytest.raises(DataError, match=r"recall-base is not there: make it with examples/pretrain"):
        prepare(place)


def test_unknown_rows_are_a_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        study.main(["--data", str(tmp_path), "--work-dir", str(tmp_path), "--rows", "elu2"])
    assert stopped.value.code == 2
    assert "no row is called elu2" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["dot", "scaled", "additive"])
def test_the_jacobian_is_that_of_softmax(kind):
    s = scores(kind, 16, torch.Generator().manual_seed(0))
    jacobians = [torch.autograd.functional.jacobian(lambda x: x.softmax(-1), row) for row in s[:32]]
    norms = torch.stack([matrix.norm() for matrix in jacobians])
    w = s[:32].softmax(-1)
    formula = (w**2).sum(-1) - 2 * (w**3).sum(-1) + (w**2).sum(-1) ** 2
    assert torch.allclose(norms, formula.sqrt())
    assert measured(kind, 16, 0)["jacobian"] == pytest.approx(float(norms.mean()), rel=0.2)


def test_variance_of_dot_products_is_d():
    assert measured("dot", 64, 0)["variance"] == pytest.approx(64, rel=0.1)
    assert measured("scaled", 64, 0)["variance"] == pytest.approx(1, rel=0.1)


def test_spread_is_mean_and_range():
    assert spread([1.0, 2.0, 6.0]) == "3 (1 to 6)"
    assert spread([1234.5]) == "1,234"
    assert spread([]) == "-"


@needs_data
def test_rows_of_the_base_that_recalls_bring_something_again():
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models/books-1m")
    text = (DATA / "text/books/eval/Emma.md").read_text(encoding="utf-8")[:60_000]
    rows = recalling([text], tokenizer, 127)
    assert rows == recalling([text], tokenizer, 127)
    plain = [row for row in rows if row in text]
    assert 0.35 < len(plain) / len(rows) < 0.65
    lone = lone_tokens(tokenizer)
    assert len(lone) > 300
    shuffled = np.random.default_rng(0).permutation(lone)[:100].tolist()
    assert tokenizer(tokenizer.decode(shuffled), add_special_tokens=False)["input_ids"] == shuffled
    again = []
    for row in rows:
        ids = tokenizer(row, add_special_tokens=False)["input_ids"]
        seen = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        again.append((row in plain, 1 - len(set(seen)) / len(seen)))
    others = [share for is_plain, share in again if not is_plain]
    assert sum(share for is_plain, share in again if is_plain) / len(plain) < 0.02
    assert sum(others) / len(others) > 0.15
