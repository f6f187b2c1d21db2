"""docs/performance.md: sections of runs, renewed one by one, without folders of the machine."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json

from helpers.fixtures_bench import finished, model, no_pictures, refused, results_of, whole_arguments

from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.bench.docs import MARKS, command


def test_the_page_of_documentation(finished, model, tmp_path, capsys):
    out = tmp_path / "whole"
    assert bench.main(whole_arguments(model, out, lengths="16")) == 0
    page = tmp_path / "performance.md"
    asked = ["--docs", str(page), str(finished), str(out)]
    assert bench.main(asked) == 0
    text = page.read_text()
    assert text.startswith("# Speed and memory")
    assert "A whole model: `tiny-base`" in text
    assert "--model tiny-base" in text
    assert str(tmp_path) not in text
    assert str(finished.parent) not in text
    assert "second" not in text
    assert "sdpa, keys in place" in text
    page.write_text("Words before.\n" + text + "Words behind.\n")
    assert bench.main(asked) == 0
    again = page.read_text()
    assert again == "Words before.\n" + text + "Words behind.\n"
    results = results_of(out)
    (out / "results.json").write_text(json.dumps({**results, "answers": ["measured again"]}))
    assert bench.main(["--docs", str(page), str(out)]) == 0
    one = page.read_text()
    assert "* measured again\n" in one
    assert one.partition("## A whole model")[0] == again.partition("## A whole model")[0]
    assert one.count("\n## ") == again.count("\n## ")
    page.write_text("No place.")
    refused(asked, "has no lines {} and {}".format(*MARKS), capsys)
    assert page.read_text() == "No place."
    refused(["--docs", str(tmp_path / "new.md"), str(tmp_path)], "holds no results", capsys)
    (out / "results.json").write_text(json.dumps({**results, "complete": False}))
    refused(asked, "unfinished run", capsys)
    assert not (tmp_path / "new.md").exists()


def test_commands_are_shown_without_folders_of_the_machine():
    shown = command(
        "python -m hf_linattn.bench --model /a/b/base --output-dir=/c/d --options '{\"size\": 4}'"
    )
    assert shown == "python -m hf_linattn.bench --model base --output-dir=d --options '{\"size\": 4}'"
