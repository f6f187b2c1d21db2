"""The report: what it shows, what it says, what it refuses."""

import csv
import json
import math
import re
from itertools import pairwise

import pytest
from helpers.fixtures_demo import comparison, finetune_results, perplexity_results, write
from helpers.pages import Page

from hf_linattn.errors import DataError
from hf_linattn.eval.report import findings
from hf_linattn.eval.report.__main__ import main
from hf_linattn.eval.report.summary import collect


def make(folder, *extra):
    output = folder / "page" / "report.html"
    arguments = ["--runs", str(folder / "runs"), "--perplexity", str(folder / "perplexity")]
    status = main([*arguments, "--output", str(output), *extra])
    return status, output


def summary_of(folder):
    return collect(folder / "runs", folder / "perplexity")


def test_page_is_one_file_with_everything_in_it(tmp_path, capsys):
    comparison(tmp_path)
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
    for name in ("unpatched", "control", "elu1", "softmax1"):
        assert name in page.text
    # 45 / 15 at the shortest length; 46 / 45; e^5 and e^4; the state, and what a growing cache needs at 8,192
    for number in ("3.00 \u00d7", "1.02 \u00d7", "148 → 54.6", "16.5 KiB", "8.0 MiB at 8,192"):
        assert number in page.text


def test_results_are_also_written_for_machines(tmp_path):
    comparison(tmp_path)
    status, _ = make(tmp_path, "--results", str(tmp_path / "results.json"))
    assert status == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["run"] for row in found["rows"]] == ["unpatched", "control", "elu1", "softmax1"]
    assert [row["role"] for row in found["rows"]] == ["original", "control", "patch", "patch"]
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert float(rows["elu1"]["perplexity_8192"]) == 46
    assert float(rows["elu1"]["ratio_to_control_512"]) == pytest.approx(3)
    assert float(rows["elu1"]["longest_over_shortest"]) == pytest.approx(46 / 45)
    assert float(rows["unpatched"]["fine_tuning_tokens"]) == 0
    assert rows["unpatched"]["validation_loss_after"] == ""


def test_findings_follow_the_numbers(tmp_path):
    said = dict(
        zip(
            ("original", "control", "elu1", "softmax1", "best"),
            findings.findings(summary_of(comparison(tmp_path))),
            strict=True,
        )
    )
    assert "breaks as soon as the context is longer than the 512 tokens" in said["original"]
    assert "7.2 times the perplexity of 512" in said["original"]
    assert "6 % less at 512 tokens" in said["control"]
    assert "3.0 times as much against the control" in said["elu1"]
    assert "better than the control at 1,024 and 8,192 tokens and worse at 512" in said["elu1"]
    assert "At no length does it differ" in said["softmax1"]
    assert "at 512 tokens control (15.0; the next has 0.7 % more)" in said["best"]
    assert "at 8,192 tokens elu1 (46.0; the next has 4.3 times as much)" in said["best"]


def test_findings_do_not_claim_what_is_not_there(tmp_path):
    flat = {512: 20.0, 1024: 19.0, 8192: 18.0}
    write(tmp_path / "perplexity" / "base" / "results.json", perplexity_results("base", flat))
    write(
        tmp_path / "perplexity" / "worse" / "results.json",
        perplexity_results("base", {n: 2 * v for n, v in flat.items()}, patch="elu1"),
    )
    original, worse, best = findings.findings(collect(None, tmp_path / "perplexity"))
    assert "breaks" not in original
    assert "does not break" in original
    assert "10 % less: more context helps" in original
    assert "control" not in worse  # there is none
    assert "Fine-tuning" not in worse
    assert "base" not in worse
    assert best.count("unpatched") == 2


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
    assert findings.change(ratio) == words


def test_sizes_in_words():
    assert [findings.size(n) for n in (12, 1024, 101376, 3 << 20, 5 << 30)] == [
        "12 B",
        "1.0 KiB",
        "99.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert findings.exponential(1e4) == math.inf


def test_training_runs_alone_make_a_page(tmp_path):
    write(tmp_path / "runs" / "a+b" / "results.json", finetune_results("a", "softmax1+logn", None, None))
    output = tmp_path / "report.html"
    assert main(["--runs", str(tmp_path / "runs"), "--output", str(output)]) == 0
    assert "a+b" in Page(output.read_text()).text


def test_position_buckets_are_drawn_where_windows_were_scored_in_full(tmp_path):
    results = perplexity_results("base", {512: 20.0}, stride="full")
    edges = [1, 64, 128, 256, 512]
    results["rows"][0]["buckets"] = [
        {"start": low, "end": high, "tokens": 10, "nats": 3.0, "perplexity": 20.0}
        for low, high in pairwise(edges)
    ]
    write(tmp_path / "perplexity" / "base" / "results.json", results)
    status, output = make(tmp_path)
    assert status == 0
    text = output.read_text()
    assert "By position" in text
    assert not re.search("same tokens at every length", text, re.IGNORECASE) or "The last full" not in text


def test_refuses_with_one_line_and_writes_nothing(tmp_path, capsys):
    def refused(reason):
        status, output = make(tmp_path)
        error = capsys.readouterr().err
        assert status == 1
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert reason in error
        assert not output.exists()

    refused("no results to report")
    results = tmp_path / "perplexity" / "base" / "results.json"
    write(results, {**perplexity_results("base", {512: 2.0}), "complete": False})
    refused("not finished")
    write(results, '{"half')
    refused("cannot read")
    write(results, perplexity_results("base", {512: 2.0}))
    write(tmp_path / "perplexity" / "b" / "results.json", perplexity_results("b", {512: 2.0}, stride=128))
    refused("measured with different --stride")
    assert main(["--output", str(tmp_path / "x.html")]) == 1
    assert "nothing to report" in capsys.readouterr().err


def test_unknown_samples_file_is_refused(tmp_path):
    comparison(tmp_path)
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.json"):
        collect(tmp_path / "runs", None, tmp_path / "nowhere.json")
