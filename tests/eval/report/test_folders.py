"""The report over result folders: what belongs together, what may be compared, what is refused."""

import csv
import json

import pytest
from helpers import fixtures_report as fixtures
from helpers.fixtures_demo import perplexity_results, write
from helpers.fixtures_perplexity import TEXTS, make_folder
from helpers.pages import Page

from hf_linattn.errors import DataError
from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.perplexity import __main__ as perplexity
from hf_linattn.eval.report.__main__ import main
from hf_linattn.eval.report.discover import discover
from hf_linattn.eval.report.rows import compare
from hf_linattn.eval.report.table import columns
from hf_linattn.finetune import __main__ as finetune


def compared(*folders, **names):
    return compare(discover(list(folders)), **names)


def row(comparison, name):
    return next(each for each in comparison.rows if each.name == name)


def cells(comparison, name):
    """(title, small title) -> cell of a row."""
    place = [each.name for each in comparison.rows].index(name)
    return {(column.title, column.small): column.cells[place] for column in columns(comparison)}


def test_every_kind_of_results_stands_on_one_page(tmp_path, capsys):
    out = fixtures.everything(tmp_path)
    output = tmp_path / "page" / "report.html"
    assert main([str(out), "--output", str(output), "--results", str(tmp_path / "table.json")]) == 0
    assert str(output) in capsys.readouterr().out
    text = output.read_text(encoding="utf-8")
    page = Page(text)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "http" not in text
    assert "script" not in page.tags
    starts = ["Perplexity against", "Recall of mqar", "Recall of passkey", "Losses of", "Bytes of the cache"]
    assert [alt for alt, start in zip(page.alts, starts, strict=True) if not alt.startswith(start)] == []
    assert "hedgehog, transfer: 5 to 4; hedgehog, distill: 5 to 4" in page.alts[3]
    assert "elu1: 4,096 B at 512" in page.alts[4]
    for name in ("base the original", "control the control: own attention, fine-tuned", "hedgehog converted"):
        assert name in page.text
    assert "the window does the work" in page.text
    assert "1,536" not in page.text  # nothing is summed up that should not be
    table = json.loads((tmp_path / "table.json").read_text())
    rows = {each["row"]: each for each in table["rows"]}
    assert list(rows) == ["base", "control", "elu1", "hedgehog"]
    assert rows["elu1"]["ratio_to_original_512"] == 1.5
    assert rows["elu1"]["ratio_to_control_1024"] == 31 / 32
    assert rows["hedgehog"]["training_tokens"] == 3000
    assert rows["hedgehog"]["stages"] == "transfer:1000 distill:2000"
    assert rows["elu1"]["recall_mqar"] == 0.25
    assert rows["hedgehog"]["recall_mqar"] is None
    assert rows["hedgehog"]["kl"] == 0.25
    assert rows["base"]["kl"] is None
    assert rows["elu1"]["cache_bytes_131072"] == 4096
    assert rows["base"]["cache_bytes_512"] == 512 * 1024
    assert rows["elu1"]["decode_ratio_2048"] == 0.5
    assert rows["control"]["cache_bytes_512"] is None
    assert set(table["asked"]) == {"perplexity", "recall", "generation", "cost"}
    assert all(list(asked) == ["a"] for asked in table["asked"].values())
    with (tmp_path / "table.csv").open(newline="") as file:
        lines = {line["row"]: line for line in csv.DictReader(file)}
    assert lines["control"]["cache_bytes_512"] == ""
    assert float(lines["base"]["perplexity_512"]) == 20


def test_what_is_missing_is_a_dash(tmp_path):
    comparison = compared(fixtures.everything(tmp_path))
    control = cells(comparison, "control")
    assert control["recall", "mqar"].text == "-"
    assert control["state", "at 512"].text == "-"
    assert control["perplexity", "at 512"].text == "16.0"
    assert cells(comparison, "base")["training", "tokens"].text == "-"
    state = cells(comparison, "elu1")["state", "at 131,072"]
    assert (state.text, state.small) == ("4.0 KiB", ["0.25 \u00d7 unpatched", "computed"])
    shown = [cell.text for name in ("base", "control") for cell in cells(comparison, name).values()]
    assert not {"0", "0.0", "0.0 %", "nan", "None"} & set(shown)


def test_folders_may_be_named_one_by_one_in_any_order(tmp_path):
    out = fixtures.everything(tmp_path)
    one = compared(out)
    measured = sorted((out / "measured").iterdir(), reverse=True)
    other = compared(*measured, out / "hedgehog", *(out / "runs").iterdir(), out)  # and twice
    assert [each.name for each in one.rows] == [each.name for each in other.rows]
    assert [each.perplexities for each in one.rows] == [each.perplexities for each in other.rows]


def test_the_original_is_the_one_that_the_trained_came_from(tmp_path):
    out = fixtures.everything(tmp_path)
    stranger = fixtures.model(tmp_path / "models" / "stranger")
    fixtures.perplexity(out / "stranger", stranger, {512: 18.0, 1024: 19.0})
    comparison = compared(out)
    assert comparison.role("original").name == "base"
    assert row(comparison, "stranger").kind == "own attention, not trained here"
    assert comparison.ratio(row(comparison, "stranger"), "original", 512) == 0.9


def test_where_two_rows_could_be_it_the_page_says_so_and_gives_no_ratio(tmp_path):
    for name in ("a", "b"):
        fixtures.perplexity(tmp_path / "out" / name, fixtures.model(tmp_path / "models" / name), {512: 10.0})
    comparison = compared(tmp_path / "out")
    assert comparison.role("original") is None
    assert any("Several rows could be the original (a, b)" in note for note in comparison.notes)
    assert cells(comparison, "a")["perplexity", "at 512"].small == ["\u00b1 1.00"]
    comparison = compared(tmp_path / "out", original="b")
    assert comparison.ratio(row(comparison, "a"), "original", 512) == 1
    with pytest.raises(DataError, match=r"no row is called 'bb'. Did you mean 'b'\? There are a, b"):
        compared(tmp_path / "out", original="bb")


def test_a_model_whose_patch_cannot_be_known_is_no_original(tmp_path):
    fixtures.perplexity(tmp_path / "out" / "x", "gone/x", {512: 10.0})
    comparison = compared(tmp_path / "out")
    assert comparison.role("original") is None
    assert row(comparison, "x").kind == "attention not known, not trained here"


def test_a_fine_tuning_of_a_patched_folder_is_no_control(tmp_path):
    base = fixtures.model(tmp_path / "base")
    first = fixtures.tuned(tmp_path / "out" / "first", base, "elu1")
    second = fixtures.tuned(tmp_path / "out" / "second", first)
    fixtures.model(second, patched=True)
    comparison = compared(tmp_path / "out")
    assert comparison.role("control") is None
    assert row(comparison, "second").own_attention is False


def test_patches_put_on_at_measuring_are_rows_of_their_own(tmp_path):
    base = fixtures.model(tmp_path / "base")
    out = fixtures.perplexity(tmp_path / "out" / "p", base, {512: 10.0}, patch="elu1")
    curves = {"base": (base, "unpatched", 0.9), "elu1": (base, "elu1", 0.2)}
    fixtures.recall(tmp_path / "out" / "r", curves)
    comparison = compared(out.parent)
    assert [each.name for each in comparison.rows] == ["base", "base elu1"]
    assert row(comparison, "base elu1").perplexities == {512: 10.0}
    assert {line["accuracy"] for line in row(comparison, "base elu1").recall} == {0.2}
    assert comparison.role("original").name == "base"


def test_folders_that_were_moved_are_found_by_what_was_recorded_or_by_name(tmp_path):
    out = fixtures.everything(tmp_path)
    moved = out.rename(tmp_path / "elsewhere")
    comparison = compared(moved)
    assert [each.name for each in comparison.rows] == ["base", "control", "elu1", "hedgehog"]
    assert row(comparison, "elu1").perplexities[512] == 30
    # nothing was recorded of this one but a place that is gone
    fixtures.perplexity(moved / "late", "/gone/models/base", {512: 21.0, 1024: 22.0}, stride=128)
    with pytest.raises(DataError, match=r"results of hf_linattn.eval.perplexity for base, asked differently"):
        compared(moved)


def test_names_are_as_long_as_needed(tmp_path):
    base = fixtures.model(tmp_path / "base")
    for name in ("a", "b"):
        fixtures.tuned(tmp_path / "out" / name / "tuned", base, "elu1")
    assert [each.name for each in compared(tmp_path / "out").rows] == ["a/tuned", "b/tuned"]


def test_other_questions_get_letters_and_no_ratio(tmp_path):
    out = fixtures.everything(tmp_path)
    other = fixtures.tuned(out / "runs" / "other", tmp_path / "models" / "base", "relu")
    fixtures.perplexity(out / "measured" / "other", other, {512: 5.0, 1024: 6.0}, stride=128)
    fixtures.cost(out / "measured" / "cost-other", other, "other", speed=9000.0, machine="M3", batch=4)
    fixtures.recall(out / "measured" / "recall-other", {"other": (other, None, 0.5)}, samples=99)
    comparison = compared(out)
    shown = cells(comparison, "other")["perplexity", "at 512"]
    assert (shown.letter, shown.small, shown.best) == ("b", ["\u00b1 0.500"], False)
    assert cells(comparison, "elu1")["perplexity", "at 512"].letter == "a"
    assert cells(comparison, "control")["perplexity", "at 512"].best  # of its own question
    assert dict(comparison.groups["perplexity"].describe())["b"] == "stride 128 where a has 256"
    assert dict(comparison.groups["recall"].describe())["b"] == "samples 99 where a has 10"
    assert "machine M3 where a has EPYC" in dict(comparison.groups["cost"].describe())["b"]
    assert cells(comparison, "other")["state", "at 512"].text == "4.0 KiB"  # of one sequence, not of four
    output = tmp_path / "report.html"
    assert main([str(out), "--output", str(output)]) == 0
    page = Page(output.read_text())
    curves = [alt for alt in page.alts if alt.startswith("Perplexity against")]
    assert ["other" in alt for alt in curves] == [False, True]
    assert len([alt for alt in page.alts if alt.startswith("Recall of mqar")]) == 2
    assert "b was not measured alike: stride 128 where a has 256" in page.text


@pytest.mark.parametrize(
    "change", [{"data": "other.txt"}, {"bos": "yes"}, {"join": True}, {"max_tokens": 7}, {"lengths": (512,)}]
)
def test_what_makes_a_question_another(tmp_path, change):
    base = fixtures.model(tmp_path / "base")
    lengths = change.pop("lengths", (512, 1024))
    fixtures.perplexity(tmp_path / "out" / "a", base, {512: 9.0, 1024: 9.0})
    fixtures.perplexity(tmp_path / "out" / "b", base, dict.fromkeys(lengths, 9.0), patch="elu1", **change)
    comparison = compared(tmp_path / "out")
    assert len(comparison.groups["perplexity"].settings) == 2
    assert comparison.ratio(row(comparison, "base elu1"), "original", 512) is None


def test_text_that_changed_under_its_name_is_another(tmp_path):
    base = fixtures.model(tmp_path / "base")
    fixtures.perplexity(tmp_path / "out" / "a", base, {512: 9.0})
    path = fixtures.perplexity(tmp_path / "out" / "b", base, {512: 9.0}, patch="elu1") / "results.json"
    results = json.loads(path.read_text())
    results["data"]["bytes"] += 1
    write(path, results)
    assert len(compared(tmp_path / "out").groups["perplexity"].settings) == 2


def test_training_that_was_not_alike_is_told(tmp_path):
    out = fixtures.everything(tmp_path)
    base = tmp_path / "models" / "base"
    fixtures.tuned(out / "runs" / "longer", base, "relu", tokens=9, lr=0.5)
    notes = compared(out).notes
    told = next(note for note in notes if note.startswith("longer"))
    assert "tokens 9 where control has 204800" in told
    assert "lr 0.5 where control has 0.001" in told
    assert not any(note.startswith("elu1") for note in notes)
    assert any(note.startswith("hedgehog") and "3,000 tokens where control has" in note for note in notes)


def test_a_task_that_the_original_cannot_do_is_said(tmp_path):
    base = fixtures.model(tmp_path / "base")
    fixtures.recall(tmp_path / "out", {"base": (base, "unpatched", 0.0)}, able="no")
    output = tmp_path / "report.html"
    assert main([str(tmp_path / "out"), "--output", str(output)]) == 0
    assert "base cannot do mqar" in Page(output.read_text()).text


def refused(capsys, folders, reason, *extra):
    output = folders[0].parent / "never.html"
    assert main([*map(str, folders), "--output", str(output), *extra]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert reason in error
    assert not output.exists()


def test_refuses_with_one_line_and_writes_nothing(tmp_path, capsys):
    base = fixtures.model(tmp_path / "base")
    refused(capsys, [tmp_path / "nowhere"], "no such folder")
    (tmp_path / "empty").mkdir()
    refused(capsys, [tmp_path / "empty"], "looked there and 2 levels below for results.json")
    refused(capsys, [base], "holds no results")
    strange = tmp_path / "strange"
    write(strange / "results.json", {"format": "other/1"})
    refused(capsys, [strange], "is no file of this package: its format is 'other/1'")
    write(strange / "results.json", {"format": "hf_linattn.harness/1"})
    refused(capsys, [strange], "hf_linattn.eval.harness, which this page does not show")
    write(strange / "results.json", {"format": "hf_linattn.bench/1"})
    refused(capsys, [strange], "hf_linattn.bench without --cost, which this page does not show")
    write(strange / "results.json", '{"half')
    refused(capsys, [strange], f"cannot read {strange / 'results.json'}")
    write(strange / "results.json", {**perplexity_results(base, {512: 2.0}), "complete": False})
    refused(capsys, [strange], "not finished: start its command again (python -m hf_linattn.eval.perplexity")
    write(strange / "results.json", {**perplexity_results(base, {512: 2.0}), "rows": []})
    refused(capsys, [strange], "holds no rows")
    results = perplexity_results(base, {512: 2.0})
    results.pop("models")
    write(strange / "results.json", results)
    refused(capsys, [strange], "it lacks models")
    write(strange / "results.json", {**perplexity_results(base, {512: 2.0}), "rows": [{"model": "it"}]})
    refused(capsys, [strange], f"{strange} holds no whole results of hf_linattn.eval.perplexity: KeyError")
    write(strange / "results.json", {**perplexity_results(base, {512: 2.0}), "models": [{}]})
    refused(capsys, [strange], "holds no whole results of hf_linattn.eval.perplexity: KeyError 'source'")
    good = fixtures.perplexity(tmp_path / "good", base, {512: 2.0})
    refused(capsys, [good], "both name base", "--original", "base", "--control", "base")


def test_two_of_a_kind_for_one_row_are_refused(tmp_path, capsys):
    base = fixtures.model(tmp_path / "base")
    one = fixtures.perplexity(tmp_path / "one", base, {512: 2.0})
    two = fixtures.perplexity(tmp_path / "two", base, {512: 2.0})
    refused(capsys, [one, two], f"{one} and {two} both hold results of hf_linattn.eval.perplexity for base")
    again = [fixtures.cost(tmp_path / name, base, "base", patched=False) for name in ("c1", "c2")]
    refused(capsys, again, "both hold results of hf_linattn.bench --cost for base")


def test_a_baseline_in_two_files_must_have_the_same_numbers(tmp_path, capsys):
    out = fixtures.everything(tmp_path)  # base is the baseline of two files there, and of equal numbers
    assert row(compared(out), "base").perplexities == {512: 20.0, 1024: 40.0}
    third = fixtures.tuned(out / "runs" / "third", tmp_path / "models" / "base", "relu")
    start = (tmp_path / "models" / "base", "base", {512: 20.0, 1024: 41.0})
    fixtures.perplexity(out / "measured" / "third", third, {512: 1.0, 1024: 2.0}, start)
    refused(capsys, [out], "for base, and their numbers differ")


def test_training_that_is_not_finished_is_refused(tmp_path, capsys):
    out = fixtures.converted(tmp_path / "conversion", fixtures.model(tmp_path / "base"))
    (out / "distill" / "results.json").unlink()
    refused(capsys, [out], "is a conversion that is not finished: no results.json of stage distill")
    write(tmp_path / "run" / "run.json", {})
    refused(capsys, [tmp_path / "run"], "is a fine-tuning that is not finished")


def test_results_that_the_page_does_not_show_are_named(tmp_path):
    out = fixtures.everything(tmp_path)
    write(out / "tasks" / "results.json", {"format": "hf_linattn.harness/1"})
    assert any("out/tasks holds results of hf_linattn.eval.harness" in note for note in compared(out).notes)


def test_a_folder_of_a_demo_is_walked_past_its_own_page(tmp_path):
    out = fixtures.everything(tmp_path)
    write(out / "results.json", {"format": "hf_linattn.summary/1", "rows": []})
    (out / "logs").mkdir()
    assert len(compared(out).rows) == 4


def test_what_the_commands_really_leave_is_understood(tmp_path):
    model = make_folder(tmp_path / "base")
    text = tmp_path / "text.txt"
    text.write_text(TEXTS[0] * 3, encoding="utf-8")
    out = tmp_path / "out"
    known = ["--model", str(model), "--data", str(text)]
    training = ["--block-size", "32", "--batch-size", "2", "--max-steps", "2", "--cpu"]
    assert finetune.main([*known, *training, "--patch", "elu1", "--output-dir", str(out / "tuned")]) == 0
    lengths = ["--lengths", "16,32", "--stride", "8", "--max-tokens", "64"]
    measured = ["--model", str(out / "tuned"), "--baseline", str(model), "--data", str(text), *lengths]
    assert perplexity.main([*measured, "--output-dir", str(out / "perplexity")]) == 0
    short = ["--cost", "--lengths", "16", "--also", "64", "--new-tokens", "2", "--rounds", "1"]
    assert bench.main(["--model", str(out / "tuned"), *short, "--output-dir", str(out / "cost")]) == 0
    comparison = compared(out)
    assert [(each.name, each.role) for each in comparison.rows] == [("base", "original"), ("tuned", "patch")]
    assert comparison.notes == []
    tuned = row(comparison, "tuned")
    assert set(tuned.results) == {"finetune", "perplexity", "cost"}
    assert tuned.tokens == 2 * 2 * 32
    assert comparison.ratio(tuned, "original", 32) > 0
    assert [line["cache_bytes"] for line in tuned.cost] == [2 * 2 * (8 * 8 + 8) * 4] * 2
    assert {line["model"] for line in tuned.unpatched_cost} == {"unpatched"}
