"""The study: commands that the package's parsers take, the page of results.json, plans of kept layers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import commands
import figures as figures_file
import numpy as np
import plot
import pytest
import run
import torch
from page import MARKS, page
from plan import BASES, HERE, LENGTHS, SCORED, TABLES, Workspace, kept_rows, rows_of
from scale import measured, scores
from texts import lone_tokens, prepare, recalling
from transformers import AutoTokenizer

from hf_linattn.convert.arguments import ConvertArguments
from hf_linattn.convert.arguments import build_parser as convert_parser
from hf_linattn.errors import DataError
from hf_linattn.eval.common.model_specs import parse_spec
from hf_linattn.eval.diagnose.__main__ import build_parser as diagnose_parser
from hf_linattn.eval.generation.__main__ import build_parser as generation_parser
from hf_linattn.eval.layers.__main__ import build_parser as layers_parser
from hf_linattn.eval.perplexity.__main__ import build_parser as perplexity_parser
from hf_linattn.eval.recall.__main__ import build_parser as recall_parser
from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.finetune.arguments import build_parser as finetune_parser
from hf_linattn.registry import parse

ROWS = {f"{name}: {row.name}": (name, row) for name, table in TABLES.items() for row in table}
TOKENS = {"long": 1e7, "recall-long": 1e7, "scratch": 4e6}
PARSERS = {
    "perplexity": perplexity_parser,
    "generation": generation_parser,
    "recall": recall_parser,
    "branches": perplexity_parser,
    "diagnose": diagnose_parser,
}


@pytest.fixture
def workspace(tmp_path):
    return Workspace(BASES["recall"], tmp_path / "data", tmp_path / "work")


def arguments_of(*words):
    return run.build_parser().parse_args(["--data", "/data", "--work-dir", "/work", *words])


@pytest.mark.parametrize(("table", "row"), ROWS.values(), ids=ROWS)
def test_commands_of_every_row_are_understood(table, row, workspace):
    if row.training == "none":
        parse(row.patch or "softmax", row.options)
    else:
        words = commands.training(workspace, row, 0)[3:]
        kind, parser = {
            "finetune": (FinetuneArguments, finetune_parser()),
            "convert": (ConvertArguments, convert_parser()),
        }[row.training]
        arguments = kind(**vars(parser.parse_args(words)))
        patches = arguments.patch.values() if isinstance(arguments.patch, dict) else [arguments.patch]
        for patch in patches:
            if patch is not None:
                parse(*patch) if isinstance(patch, list) else parse(patch, arguments.options or {})
        if row.training == "convert":
            stages = arguments.chosen_stages()
            assert stages[-1] == row.last_stage
            tokens = sum(arguments.stage_tokens(stage) for stage in stages)
        else:
            tokens = arguments.max_steps * arguments.batch_size * arguments.block_size
        assert tokens == pytest.approx(TOKENS.get(table, 1e6), rel=0.01)
        assert row.steps == pytest.approx(tokens / (arguments.batch_size * 512), rel=0.03)
    every = replace(workspace, base=replace(BASES["recall"], measures=[*PARSERS]))
    for measure, words in commands.measurements(every, row, 0):
        arguments = PARSERS[measure]().parse_args(words[3:])
        entries = (arguments.patch or []) if measure == "recall" else []
        for entry in [entries] if isinstance(entries, str) else entries:
            patch, options, rope = parse_spec(entry)
            assert (patch, options, rope) == (row.patch or "softmax", row.options, row.rope_scaling)
        if measure == "perplexity":
            assert tuple(arguments.lengths) == LENGTHS
            assert arguments.max_tokens == SCORED


def test_jobs_wait_for_jobs_that_are_there(tmp_path):
    jobs = run.all_jobs([Workspace(base, tmp_path, tmp_path) for base in BASES.values()], arguments_of())
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for number, job in enumerate(jobs):
        assert set(job.after) <= set(names[:number])
    assert "recall layers" in names
    assert "recall-long layers" not in names  # its row is chosen already
    assert "scale" in names


def test_main_rows_have_the_seeds_of_their_base():
    control = ROWS["lengths: control"][1]
    assert control.seeds(BASES["books"]) == (0, 1, 2)
    assert control.seeds(BASES["stories"]) == (0,)
    assert ROWS["lengths: taylor"][1].seeds(BASES["books"]) == (0,)
    assert {row.name for row in rows_of(BASES["stories"], ["lengths"]) if not row.main} == {"original"}


def test_the_page_is_made_of_the_figures_beside_it(tmp_path):
    for name in ("results.md", "results.json"):
        shutil.copy(HERE / name, tmp_path / name)
    argv = ["--data", "/data", "--work-dir", str(tmp_path / "work"), "--output", str(tmp_path / "results.md")]
    assert run.main([*argv, "--no-run"]) == 0
    for name in ("results.md", "results.json"):
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes(), name


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
    folder = Workspace(BASES["books"], tmp_path, tmp_path).folder
    for name, factor in (("original", 20), ("control-0", 10), ("control-1", 30), ("elu1-0", 50)):
        write(folder / "perplexity" / name / "results.json", curve(factor))
    write(folder / "perplexity" / "hedgehog-0" / "results.json", {**curve(1), "complete": False})
    both = [{"model": "both", "perplexity": 20.0}, {"model": "linear", "perplexity": 99.5}]
    write(folder / "branches" / "window-hedgehog-0" / "results.json", {"complete": True, "rows": both})
    for name in ("window-sinks", "window-64-0"):  # windows alone are no hybrids
        write(folder / "perplexity" / name / "results.json", curve(1))
    text = page(tmp_path, tmp_path, figures_file.collect({}, tmp_path))
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
    carrying = folder / "branches" / "window-gated-hedgehog-0" / "results.json"
    write(carrying, {"complete": True, "rows": [{**both[0], "perplexity": 90.0}, both[1]]})
    write(folder / "perplexity" / "window-gated-hedgehog-0" / "results.json", curve(30))
    write(folder / "perplexity" / "window-hedgehog-0" / "results.json", curve(22))
    text = page(tmp_path, tmp_path, figures_file.collect({}, tmp_path))
    assert f"| window hybrid (64), x control | 1.01 | 1.100 | {name} | missed by 0.090 |" in text
    assert "| window hybrid (64) where that is at most 1.5, x control | 1.01 | 1.500 | `window+gated`" in text
    assert str(tmp_path) not in text


def recall_results():
    row = {"task": "induction", "length": 512, "chance": 0.001}
    labels = ("original", "patched")
    rows = [{**row, "model": labels[n // 2], "accuracy": n / 4} for n in range(4)]
    return {"complete": True, "models": [{"label": label} for label in labels], "rows": rows}


def test_figures_go_on_without_the_work_folder(tmp_path):
    work, row = tmp_path / "work", TABLES["kept"][2]
    workspace = Workspace(BASES["recall"], tmp_path, work)
    write(work / workspace.key("perplexity", row, 0) / "results.json", curve(1 / 3))
    write(work / workspace.key("recall", row, 0) / "results.json", recall_results())
    write(workspace.trained(row, 0) / "results.json", {"steps": 245})  # no measurement
    figures = figures_file.collect({}, work)
    assert sorted(figures) == ["recall/perplexity/hedgehog-0", "recall/recall/hedgehog-0"]
    assert figures["recall/perplexity/hedgehog-0"]["lengths"]["512"] == 0.333333
    assert figures["recall/recall/hedgehog-0"] == {
        "original": {"induction": {"512": 0.125}},
        "row": {"induction": {"512": 0.625}},
        "chance": {"induction": {"512": 0.001}},
    }

    path = tmp_path / "figures.json"
    figures_file.write(path, figures)
    shutil.rmtree(work)
    workspace = replace(workspace, figures=figures_file.load(path))
    assert workspace.figures == figures

    def finished():
        return {job.name: job.finished() for job in run.jobs_for(workspace, [row], arguments_of())}

    assert finished()["recall perplexity hedgehog-0"]
    assert not finished()["recall generation hedgehog-0"]
    assert not finished()["recall train hedgehog-0"]  # its text is still to be written
    figures |= {"recall/generation/hedgehog-0": {}}
    workspace = replace(workspace, figures=figures)
    assert not finished()["recall train hedgehog-0"]  # its layers are still to be ranked
    figures["recall/layers"] = {}
    assert all(finished().values())


@pytest.mark.parametrize("content", ["not json", "[1]", '{"scale": 1}'])
def test_figures_of_something_else_are_refused(content, tmp_path, capsys):
    stored = tmp_path / "page.json"
    stored.write_text(content)
    argv = ["--data", str(tmp_path), "--work-dir", str(tmp_path), "--output", str(tmp_path / "page.md")]
    assert run.main([*argv, "--no-run"]) == 1
    assert "does not hold the figures of the study" in capsys.readouterr().err
    assert stored.read_text() == content
    assert not (tmp_path / "page.md").exists()


def test_layers_kept_by_several_methods_are_one_row(workspace, capsys):
    assert kept_rows(workspace) == {}
    layers_parser().parse_args(commands.layers(workspace)[3:])
    points = [("kl", [2], "softmax", 1), ("even", [3], "softmax", 1), ("recall", [2], "softmax", 1)]
    points += [("kl", [2], "nope", 1), ("kl", [], "softmax", 0), ("even", [1, 4], "softmax", 2)]
    tradeoff = [{"curve": c, "kept": kept, "count": n, "key": [own, kept]} for c, own, kept, n in points]
    path = workspace.work / workspace.layers / "results.json"
    write(path, {"complete": False, "layers": []})
    assert figures_file.collect({}, workspace.work) == {}  # still being ranked
    path.write_text(json.dumps({"layers": [{"number": n} for n in range(6)], "tradeoff": tradeoff}))
    workspace = replace(workspace, figures=figures_file.collect({}, workspace.work))
    rows = kept_rows(workspace)
    variants = ("tuned", "gated", "window", "nope", "nope-logn", "nope-both", "nope-logn-both")
    assert [*rows] == ["kept-2", *(f"kept-2-{name}" for name in variants), "kept-3", "kept-1-4"]

    def plan_of(name):
        words = commands.training(workspace, rows[name], 0)[3:]
        return ConvertArguments(**vars(convert_parser().parse_args(words))).patch

    assert plan_of("kept-2-nope-logn")["2"] == "nope+logn"
    assert rows["kept-2-window"].label == "softmax in 2, `window+gated` (hedgehog) elsewhere"
    plan = plan_of("kept-2-gated")
    assert plan["0,1,3,4,5"][0] == "gated"
    assert plan["0,1,3,4,5"][1]["feature_map"] == "taylor2"
    assert rows["kept-2"].patch == {"0,1,3,4,5": "hedgehog"}
    assert rows["kept-2"].label == "softmax in 2: kl, recall"
    assert plan_of("kept-1-4") == {"0,2,3,5": "hedgehog"}
    assert rows["kept-2"].slot(0) == "kept-2-0"
    words = [
        "--data",
        "d",
        "--work-dir",
        str(workspace.work),
        "--base",
        "recall",
        "--tables",
        "kept",
        "--list",
    ]
    assert run.main([*words, "--rows", "kept-2-gated"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in listed] == [
        "hf_linattn.convert",
        *(f"hf_linattn.eval.{name}" for name in ("perplexity", "generation", "recall")),
    ]
    assert all("kept-2-gated" in line for line in listed)


def test_a_missing_base_says_what_makes_it(workspace):
    with pytest.raises(DataError, match=r"recall-base is not there: make it with studies/pretrain"):
        prepare(workspace)


def test_unknown_rows_are_a_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(["--data", str(tmp_path), "--work-dir", str(tmp_path), "--rows", "elu2"])
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


def test_rows_of_the_base_that_recalls_bring_something_again(data):
    tokenizer = AutoTokenizer.from_pretrained(data / "models/books-1m")
    text = (data / "text/books/eval/Emma.md").read_text(encoding="utf-8")[:60_000]
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


def anchors(path):
    """The anchors of a page's headings, as GitHub names them."""
    names = []
    for heading in re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return names


PAGES = [*HERE.glob("*.md"), *HERE.parent.glob("docs/*.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(HERE.parent).as_posix())
def test_links_to_the_study_lead_to_pages_and_headings(path):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", path.read_text(encoding="utf-8")):
        leads = (path.parent / target).resolve() if target else path
        if "://" not in target and HERE in (path.parent, leads.parent):
            assert leads.exists(), target
            assert not anchor or anchor in anchors(leads), f"{target}#{anchor}"


def test_the_figure_is_drawn(tmp_path):
    plot.main(["--output", str(tmp_path / "results.svg")])
    text = (tmp_path / "results.svg").read_text(encoding="utf-8")
    assert all(f">{label}<" in text for label in plot.CURVES)


def test_marks_stand_once_in_the_page():
    text = (HERE / "results.md").read_text(encoding="utf-8")
    assert [text.count(mark) for mark in MARKS] == [1, 1]
