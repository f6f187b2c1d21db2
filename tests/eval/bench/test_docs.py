"""docs/performance: a page a run, renewed one by one, without folders of the machine."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.fixtures_bench import finished, model, no_pictures, refused, results_of, whole_arguments
from helpers.paths import ROOT

from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.bench.docs import MARK, command, title

DOCS = ROOT / "docs"


def test_every_run_gets_a_page_of_its_own(finished, model, tmp_path, capsys):
    out, pages = tmp_path / "whole", tmp_path / "docs" / "performance"
    assert bench.main(whole_arguments(model, out, lengths="16")) == 0
    asked = ["--docs", str(pages), str(finished), str(out)]
    assert bench.main(asked) == 0
    assert sorted(path.name for path in pages.iterdir()) == ["out.md", "whole.md"]
    alone, whole = (pages / "out.md").read_text(), (pages / "whole.md").read_text()
    assert alone.startswith("# elu1, softmax1 alone, 1x4/2x8, float32: ")
    assert re.match(r"# elu1 in the model `tiny-base`: .+, \d threads?, eager\n", whole)
    assert "--model tiny-base" in whole
    assert "sdpa, keys in place" in alone
    for text in (alone, whole):
        assert text.splitlines()[2] == MARK
        assert str(tmp_path) not in text
        assert str(finished.parent) not in text
        assert "second" not in text

    results = results_of(out)
    (out / "results.json").write_text(json.dumps({**results, "answers": ["measured again"]}))
    assert bench.main(["--docs", str(pages), str(out)]) == 0
    assert "* measured again\n" in (pages / "whole.md").read_text()
    assert (pages / "out.md").read_text() == alone

    capsys.readouterr()
    (pages / "out.md").write_text("Mine.")
    refused(asked, "was not written by this command", capsys)
    assert (pages / "out.md").read_text() == "Mine."
    shutil.copytree(out, tmp_path / "copy" / "whole")
    refused(["--docs", str(pages), str(out), str(tmp_path / "copy" / "whole")], "are called whole", capsys)
    refused(["--docs", str(tmp_path / "new"), str(tmp_path)], "holds no results", capsys)
    (out / "results.json").write_text(json.dumps({**results, "complete": False}))
    refused(["--docs", str(tmp_path / "new"), str(out)], "unfinished run", capsys)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    refused(["--docs", str(tmp_path / "file"), str(finished)], "cannot write", capsys)


@pytest.mark.parametrize(
    ("arguments", "run", "expected"),
    [
        ({}, {}, "gated alone, 1x8x64, float32: AMD EPYC, 1 thread, eager"),
        ({"cpp": True}, {"threads": 2}, "gated alone, 1x8x64, float32: AMD EPYC, 2 threads, C++"),
        (
            {"bidirectional": True, "peers": ["fla"]},
            {"device": "cuda", "device_name": "A GPU"},
            "gated alone, 1x8x64, float32, over all keys, with other implementations: A GPU",
        ),
        (
            {"model": "/models/base", "patches": None},
            {},
            "elu1 in the model `base`: AMD EPYC, 1 thread, eager",
        ),
    ],
)
def test_titles_say_what_was_measured_on_what(arguments, run, expected):
    usual = {"patches": ["gated"], "shapes": ["1x8x64"], "dtypes": ["float32"], "model": None}
    usual |= {"bidirectional": False, "peers": None, "cpp": False}
    here = {"device": "cpu", "machine": "AMD EPYC, 2 cores, Linux x86_64", "threads": 1}
    rows = [{"candidate": name} for name in ("sdpa", "elu1")]
    assert title({"arguments": usual | arguments, "run": here | run, "rows": rows}) == expected


def test_commands_are_shown_without_folders_of_the_machine():
    shown = command(
        "python -m hf_linattn.bench --model /a/b/base --output-dir=/c/d --options '{\"size\": 4}'"
    )
    assert shown == "python -m hf_linattn.bench --model base --output-dir=d --options '{\"size\": 4}'"


@pytest.mark.parametrize("flag", ["--output-dir {}", "--output {}", "--out={}/", "--output-dir={}"])
def test_beginnings_of_options_are_known(flag, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    words = flag.format("/secret/named")
    called = {**results_of(out), "command": f"python -m hf_linattn.bench --mod /secret/base {words}"}
    (out / "results.json").write_text(json.dumps(called))
    assert bench.main(["--docs", str(tmp_path / "docs"), str(out)]) == 0
    text = (tmp_path / "docs" / "named.md").read_text()
    assert "--model base --output-dir" in text
    assert "secret" not in text


def test_a_damaged_results_file_is_refused(tmp_path, capsys):
    for content in ("[]", "5", '{"format"', "{}"):
        (tmp_path / "results.json").write_text(content)
        refused(["--docs", str(tmp_path / "docs"), str(tmp_path)], "of this command", capsys)


def test_the_pages_in_docs_have_titles_of_their_own_and_are_listed():
    pages = sorted((DOCS / "performance").glob("*.md"))
    titles = [path.read_text(encoding="utf-8").splitlines()[0] for path in pages]
    assert len(set(titles)) == len(titles) > 10
    contents = (DOCS / "performance.md").read_text(encoding="utf-8")
    for path, heading in zip(pages, titles, strict=True):
        assert heading.startswith("# "), path
        assert f"(performance/{path.name})" in contents
        text = path.read_text(encoding="utf-8")
        if "<!-- bench: written" in text:
            assert re.search(r"--output-dir[= ](\S+)", text)[1] == path.stem


def test_the_table_in_docs_is_that_of_the_pages():
    contents = (DOCS / "performance.md").read_text(encoding="utf-8")
    lines = [line for line in contents.splitlines() if line.startswith("| `") and "](performance/" in line]
    assert len(lines) > 15
    for line in lines:
        patch, *_, reading, training, decoding, ratios, link = (
            cell.strip() for cell in line.split("|")[1:-1]
        )
        name = re.search(r"performance/(.+\.md)", link)[1]
        text = (DOCS / "performance" / name).read_text(encoding="utf-8")
        speeds = dict(
            re.findall(r"^\*\*Times as fast as softmax\*\*: ([a-z ]+),.*\n\n((?:\|.*\n)+)", text, re.M)
        )
        ratios, _, length = ratios.partition(" at ")
        starts = (reading, training, decoding)
        kinds = ("prefill", "forward and backward", "decode")
        for kind, start, ratio in zip(kinds, starts, ratios.split(" / "), strict=True):
            table = [
                [cell.strip() for cell in row.split("|")[1:-1]] for row in speeds.get(kind, "").splitlines()
            ]
            own = [dict(zip(table[0], row, strict=True)) for row in table if row[0] == patch.strip("`")]
            printed = [(row["faster from"], row[length]) for row in own] or [("-", "-")]
            assert printed == [(start, ratio)], (name, patch, kind)
