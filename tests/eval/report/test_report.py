"""The report: what it shows, what it says, what it refuses."""

import csv
import json
import math
from itertools import pairwise

import pytest
from helpers import fixtures_report as fixtures
from helpers.fixtures_demo import perplexity_results, write
from helpers.pages import Page

from hf_linattn.errors import DataError
from hf_linattn.eval.common import formatting
from hf_linattn.eval.report import findings
from hf_linattn.eval.report.__main__ import main
from hf_linattn.eval.report.discover import discover
from hf_linattn.eval.report.rows import compare


def make(folder, *extra):
    output = folder / "page" / "report.html"
    status = main([str(folder / "runs"), str(folder / "perplexity"), "--output", str(output), *extra])
    return status, output


def compared(*folders, **options):
    return compare(discover(list(folders)), **options)


def said(comparison):
    return findings.findings(comparison, comparison.curves[0])


def test_page_is_one_file_with_everything_in_it(tmp_path, capsys):
    fixtures.comparison(tmp_path)
    status, output = make(
        tmp_path, "--samples", str(tmp_path / "samples.json"), "--note", "Text: <some> & more."
    )
    assert status == 0
    assert str(output) in capsys.readouterr().out
    text = output.read_text(encoding="utf-8")
    page = Page(text)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "http" not in text
    assert "script" not in page.tags  # nothing runs, and what a model wrote is text
    assert "</pre><script>alert('0')" in page.text
    assert "Text: <some> & more." in page.text
    assert all(len(alt) > 30 for alt in page.alts)
    assert len(page.alts) == 2
    assert "16 at 512, 115 at 1,024, 202 at 8,192" in page.alts[0]
    for name in ("base the original", "control the control", "elu1 fine-tuned", "softmax1 fine-tuned"):
        assert name in page.text
    # 45 / 15 at the shortest length; 46 / 45; e^5 and e^4; the state, and what a growing cache needs at 8,192
    for number in ("3 \u00d7 control", "1.02 \u00d7", "148 → 54.6", "16.5 KiB", "8.0 MiB at 8,192"):
        assert number in page.text
    for part in (
        "Does more context help or hurt?",
        "It breaks as soon as",
        "What they write",
        "Prompt 1: the end of 1,007 characters",
        "What these numbers mean, and what they do not",
        "Equal tokens, not equal care.",
        "python -m hf_linattn.finetune",
        "torch 2.13.0",
        "seed of training 0",
        "204,800 tokens of training each",
        "2,048 tokens scored per length",
    ):
        assert part in page.text, part


def test_results_are_also_written_for_machines(tmp_path):
    fixtures.comparison(tmp_path)
    extra = ("--results", str(tmp_path / "results.json"), "--samples", str(tmp_path / "samples.json"))
    assert make(tmp_path, *extra)[0] == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["lengths"], results["train_length"]) == ([512, 1024, 8192], 512)
    assert [row["row"] for row in results["rows"]] == ["base", "control", "elu1", "softmax1"]
    assert [row["run"] for row in results["rows"]] == ["base", "control", "elu1", "softmax1"]
    assert [row["role"] for row in results["rows"]] == ["original", "control", "patch", "patch"]
    assert [row["patch"] for row in results["rows"]] == ["", "", "elu1", "softmax1"]
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert float(rows["elu1"]["perplexity_8192"]) == 46
    assert float(rows["elu1"]["ratio_to_control_512"]) == pytest.approx(3)
    assert float(rows["elu1"]["longest_over_shortest"]) == pytest.approx(46 / 45)
    assert float(rows["elu1"]["validation_loss_after"]) == 4
    assert rows["elu1"]["state_bytes"] == "16896"
    assert rows["control"]["bytes_per_token"] == "1024"
    assert rows["control"]["fine_tuning_tokens"] == rows["control"]["training_tokens"] == "204800"
    assert float(rows["control"]["fine_tuning_seconds"]) == 61.2
    assert (rows["base"]["fine_tuning_tokens"], rows["base"]["training_tokens"]) == ("0", "")
    assert rows["base"]["validation_loss_after"] == ""


def test_older_options_name_folders_and_say_so(tmp_path, capsys):
    fixtures.comparison(tmp_path)
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    assert make(tmp_path, "--results", str(new))[0] == 0
    older = ["--runs", str(tmp_path / "runs"), "--perplexity", str(tmp_path / "perplexity")]
    capsys.readouterr()
    assert main([*older, "--output", str(tmp_path / "old.html"), "--results", str(old)]) == 0
    assert f"--runs will go with the next release: give {tmp_path / 'runs'} as" in capsys.readouterr().err
    assert json.loads(new.read_text()) == json.loads(old.read_text())


def test_commands_of_the_user_name_their_rows(tmp_path):
    fixtures.comparison(tmp_path)
    write(tmp_path / "commands.json", {"unpatched": ["measure it"], "elu1": ["train it", "and so on"]})
    rows = {row.name: row for row in compared(tmp_path, commands=tmp_path / "commands.json").rows}
    assert list(rows) == ["unpatched", "control", "elu1", "softmax1"]
    assert rows["unpatched"].commands == ["measure it"]
    assert rows["elu1"].commands == ["train it", "and so on"]
    assert all(text.startswith("python -m") for text in rows["control"].commands)


def test_findings_follow_the_numbers(tmp_path):
    comparison = compared(fixtures.comparison(tmp_path), samples=tmp_path / "samples.json")
    sentences = dict(zip(("original", "control", "elu1", "softmax1", "best"), said(comparison), strict=True))
    assert "breaks as soon as the context is longer than the 512 tokens" in sentences["original"]
    assert "7.2 times the perplexity of 512" in sentences["original"]
    assert "on the same batches" in sentences["control"]
    assert "6 % less at 512 tokens" in sentences["control"]
    assert "3.0 times as much against the control" in sentences["elu1"]
    assert "better than the control at 1,024 and 8,192 tokens and worse at 512" in sentences["elu1"]
    assert "validation perplexity from 148, with the attention just swapped, to 54.6" in sentences["elu1"]
    assert "A sequence of any length is held in 16.5 KiB" in sentences["elu1"]
    assert "At no length does it differ" in sentences["softmax1"]
    assert "at 512 tokens control (15.0; the next has 0.7 % more)" in sentences["best"]
    assert "at 8,192 tokens elu1 (46.0; the next has 4.3 times as much)" in sentences["best"]


def test_findings_do_not_claim_what_is_not_there(tmp_path):
    flat = {512: 20.0, 1024: 19.0, 8192: 18.0}
    base = fixtures.model(tmp_path / "base")
    fixtures.perplexity(tmp_path / "out" / "base", base, flat)
    doubled = {n: 2 * v for n, v in flat.items()}
    fixtures.perplexity(tmp_path / "out" / "worse", base, doubled, patch="elu1")
    comparison = compared(tmp_path / "out")
    original, worse, best = said(comparison)
    assert "breaks" not in original
    assert "does not break" in original
    assert "10 % less: more context helps" in original
    assert "control" not in worse  # there is none
    assert "Training" not in worse
    assert best.count("base (") == 2
    cautions = " ".join(findings.cautions(comparison))
    assert "Equal tokens" not in cautions
    assert "The last 256 tokens of each window are scored" in cautions


def test_training_that_was_not_alike_is_no_equal_care(tmp_path):
    fixtures.comparison(tmp_path)
    fixtures.tuned(tmp_path / "runs" / "longer", tmp_path / "base", "relu", tokens=9)
    comparison = compared(tmp_path)
    cautions = " ".join(findings.cautions(comparison))
    assert "The runs saw different amounts of text" in cautions
    assert "Equal tokens" not in cautions
    assert "on the same batches" not in " ".join(said(comparison))


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1.0, "no change"),
        (1.004, "0.4 % more"),
        (0.5, "50 % less"),
        (2.5, "2.5 times as much"),
        (30, "30 times as much"),
    ],
)
def test_ratios_in_words(ratio, words):
    assert formatting.change(ratio) == words


def test_sizes_in_words():
    assert [formatting.size(n) for n in (12, 1024, 101376, 3 << 20, 5 << 30)] == [
        "12 B",
        "1.0 KiB",
        "99.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert formatting.exponential(1e4) == math.inf


def test_training_runs_alone_make_a_page(tmp_path):
    fixtures.tuned(tmp_path / "runs" / "a+b", fixtures.model(tmp_path / "base"), "softmax1+logn")
    output = tmp_path / "report.html"
    assert main([str(tmp_path / "runs"), "--output", str(output)]) == 0
    assert "a+b" in Page(output.read_text()).text


def test_position_buckets_are_drawn_where_windows_were_scored_in_full(tmp_path):
    results = perplexity_results(fixtures.model(tmp_path / "base"), {512: 20.0}, stride="full")
    results["rows"][0]["buckets"] = [
        {"start": low, "end": high, "tokens": 10, "nats": 3.0, "perplexity": 20.0}
        for low, high in pairwise([1, 64, 128, 256, 512])
    ]
    write(tmp_path / "out" / "results.json", results)
    output = tmp_path / "report.html"
    assert main([str(tmp_path / "out"), "--output", str(output)]) == 0
    text = Page(output.read_text()).text
    assert "By position" in text
    assert "The same tokens at every length" not in text


def test_nothing_to_report_is_refused(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "x.html")]) == 1
    assert "nothing to report: give folders" in capsys.readouterr().err


def test_one_file_for_two_outputs_is_refused(tmp_path, capsys):
    page = str(tmp_path / "x.html")
    for results, message in (("x.csv", "--results is a .json"), ("x.html", "are the same file")):
        assert main([str(tmp_path), "--output", page, "--results", str(tmp_path / results)]) == 1
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_read_are_refused(tmp_path):
    fixtures.comparison(tmp_path)
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.json"):
        compared(tmp_path, samples=tmp_path / "nowhere.json")
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.json"):
        compared(tmp_path, commands=tmp_path / "nowhere.json")
    write(tmp_path / "other.json", {"samples": [{"nothing": 1}]})
    with pytest.raises(DataError, match=r"other\.json holds no samples of hf_linattn\.eval\.generation"):
        compared(tmp_path, samples=tmp_path / "other.json")
