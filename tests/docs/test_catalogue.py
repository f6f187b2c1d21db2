"""The catalogue of patches: docstrings read, pages written from results, measuring resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.fixtures_perplexity import make_folder
from helpers.paths import ROOT

from hf_linattn import finetune, registry
from hf_linattn.attention import LinearAttention, Modifier, ScoreAttention
from tools.catalogue import __main__ as catalogue
from tools.catalogue import docstrings as catalogue_text
from tools.catalogue import measure as catalogue_measure
from tools.catalogue import pages as catalogue_pages
from tools.catalogue import plan
from tools.catalogue.docstrings import GROUPS, CatalogueError, Entry, Option, read
from tools.catalogue.plan import CONTROL, ORIGINAL, Settings, Subject, key_of

DOC = """Weights that fade.

    w_ij = 2^-(i - j) |s_ij|,
    and so on

    Shapes: `[B, H, N, D]`.

    Prose of
    two lines.

    Options:
        rate: how fast,
            above 0.
        kind: "a" or "b".

    Use: where it is wanted. Not
        elsewhere.

    Source: "A Paper", Somebody 2020,
    section 3.
    """


def make(doc=DOC, base=LinearAttention, **attributes):
    """A class with options rate and kind; the registry does not know it."""

    class Fading(base):
        def __init__(self, site, *, rate: float = 0.5, kind: str = "a"):
            super().__init__(site)

    Fading.__doc__ = doc
    Fading.name = "fading"
    for name, value in attributes.items():
        setattr(Fading, name, value)
    return Fading


def test_a_docstring_becomes_an_entry():
    assert read(make()) == Entry(
        name="fading",
        group="feature map",
        summary="Weights that fade.",
        formula="w_ij = 2^-(i - j) |s_ij|,\nand so on",
        use="where it is wanted. Not elsewhere.",
        source='"A Paper", Somebody 2020, section 3.',
        time="O(n)",
        directions="both",
        prose=("Prose of two lines.",),
        options=(Option("rate", "0.5", "how fast, above 0."), Option("kind", "'a'", '"a" or "b".')),
    )


def test_a_modifier_costs_what_it_joins_unless_it_says_otherwise():
    assert read(make(base=Modifier)).time == "as the attention it joins"
    assert read(make(base=Modifier, time="O(n log n)")).time == "O(n log n)"
    assert read(make(base=ScoreAttention)).time == "O(n^2)"


@pytest.mark.parametrize(
    ("change", "attributes", "words"),
    [
        (("Use: ", "When: "), {}, r"'Use:' \(one such"),
        (("Source: ", "From: "), {}, "no paragraph 'Source:'"),
        (("Prose of", "Use: twice"), {}, "no paragraph 'Use:'"),
        (("section 3.", "section 3.\n\n    More prose."), {}, "'Source:' is not the last"),
        (("that fade.", "that\n    fade."), {}, "no summary of one line"),
        ((DOC, "Weights.\n\nUse: a.\n\nSource: b."), {}, "no formula.*"),
        ((DOC, ""), {}, "no paragraph 'Use:'.*no paragraph 'Source:'.*no summary.*no formula"),
        (
            ("        rate: how", "        speed: how"),
            {},
            "'rate' is not described.*'speed', which is no option",
        ),
        (("rate: how", "the rate is how"), {}, "no indented 'name: text': 'the rate is how fast,'"),
        (("", ""), {"group": "odd"}, "group is 'odd', not one of 'feature map'"),
        (("", ""), {"directions": "causal"}, "no `direction_reason` for causal only"),
        (("", ""), {"directions": "sideways"}, "directions is 'sideways'"),
    ],
)
def test_what_is_missing_is_named_with_the_class(change, attributes, words):
    doc = DOC.replace(*change) if change[0] else DOC
    with pytest.raises(CatalogueError, match=rf"test_catalogue.*Fading \('fading'\): .*{words}"):
        read(make(doc, **attributes))


@pytest.mark.parametrize("name", sorted(registry.patches()))
def test_every_registered_patch_has_an_entry(name):
    entry = read(registry.patches()[name])
    assert all((entry.summary, entry.formula, entry.use, entry.source))
    assert "\n" not in entry.summary


def test_all_problems_come_at_once(monkeypatch):
    bad = {"a": make(DOC.replace("Use: ", "")), "b": make(DOC.replace("Source: ", ""))}
    monkeypatch.setattr(catalogue_text, "patches", lambda: bad)
    with pytest.raises(CatalogueError, match=r"'Use:'.*\n.*'Source:'"):
        catalogue_text.read_all()


LAYER = {"parameters": 0, "state_bytes": 1152, "bytes_per_token": None, "window": None}
FACTS = {"class": "TinyForCausalLM", "parameters": 260032, "layers": [LAYER, {**LAYER, "parameters": 1024}]}
VERSIONS = {"torch": "2.0", "transformers": "5.0"}


def figures(perplexity):
    return {"perplexity": perplexity, "stderr": perplexity / 50, "tokens": 32704, "windows": 64}


RESULTS = {
    "original": {"before": figures(3.6953), "model": FACTS, "versions": VERSIONS},
    "control": {"after": figures(3.7), "tokens": 307200, "versions": VERSIONS},
    "fading": {"before": figures(1234.5), "after": figures(21.09), "model": FACTS, "tokens": 307200},
    "broken": {"error": "RuntimeError: no | luck"},
}


def write(results):
    entry = read(make())
    entries = {
        "fading": entry,
        "backward": dataclasses.replace(
            entry, name="backward", directions="bidirectional", why="it reads ahead", options=()
        ),
        "broken": dataclasses.replace(entry, name="broken", group="scores"),
    }
    composed = {"fading+broken": "Both."}
    return catalogue_pages.pages(entries, composed, {"gone": "why not"}, results, Settings(), "$M/m", "$M/d")


def test_the_pages():
    pages = write(RESULTS)
    assert pages == write(dict(reversed(RESULTS.items())))
    assert list(pages) == ["README.md", "feature-maps.md", "scores.md", "compositions.md"]
    lines = pages["feature-maps.md"].splitlines()
    row = next(line for line in lines if line.startswith("| [`fading`](#fading) | Weights that fade. |"))
    assert row.endswith("| O(n) | 1,152 B constant | 0; 1,024 | both | 1,234 | 21.09 |")
    assert (
        "| [`backward`](#backward) | Weights that fade. | O(n) | - | - | bidirectional only | - | - |"
        in lines
    )
    assert "- bidirectional only: it reads ahead" in lines
    text = pages["feature-maps.md"]
    entry = text[text.index("## `fading`\n") : text.index("## `backward`\n")].splitlines()
    assert entry[2:8] == [
        "Weights that fade.",
        "",
        "```text",
        "w_ij = 2^-(i - j) |s_ij|,",
        "and so on",
        "```",
    ]
    assert "| `rate` | `0.5` | how fast, above 0. |" in entry
    assert "**Use:** where it is wanted. Not elsewhere." in entry
    assert "| `fading` | 1,234 +- 25 | 21.09 +- 0.42 |" in entry
    assert "| without a patch | 3.695 +- 0.074 | 3.700 +- 0.074 |" in entry
    assert 'Source: "A Paper", Somebody 2020, section 3.' in entry
    assert "| `backward` |" not in text  # no figures of what a causal model cannot have
    scores = pages["scores.md"]
    assert "| [`broken`](#broken) | Weights that fade. | O(n) | not measured | not measured | both " in scores
    assert "| failed | failed |" in scores
    assert "measuring it failed with RuntimeError: no | luck" in scores
    # the composition has no result of its own; its parts lie on other pages
    composed = pages["compositions.md"]
    assert (
        "| [`fading+broken`](#fadingbroken) | Both. | O(n) | not measured | not measured | both | not m"
        in composed
    )
    assert "Both. Made of [`fading`](feature-maps.md#fading) and [`broken`](scores.md#broken)." in composed


def test_the_index():
    text = write(RESULTS)["README.md"]
    lines = text.splitlines()
    for start in (
        "| [`fading`](feature-maps.md#fading) | [Linear: a feature map](feature-maps.md) | Weights that "
        "fade. | O(n) | 1,152 B constant | 1,234 | 21.09 |",
        "| [`backward`](feature-maps.md#backward) | ",
        "| [`broken`](scores.md#broken) | [Other functions of the scores](scores.md) | ",
        "| [`fading+broken`](compositions.md#fadingbroken) | [Compositions](compositions.md) | Both. ",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert "python -m tools.catalogue --model $M/m --data $M/d" in text
    assert "TinyForCausalLM, 260,032 parameters, 2 layers" in text
    assert "(307,200 tokens)" in text
    assert "- `gone`: why not" in lines


DOCS = ROOT / "docs" / "patches"
REWRITE = "write docs/patches again by `python -m tools.catalogue`"


def test_the_pages_in_docs_say_what_the_patches_say():
    for entry in catalogue_text.read_all().values():
        text = (DOCS / GROUPS[entry.group].page).read_text(encoding="utf-8")
        start = text.index(f"\n## `{entry.name}`\n")
        own = text[start : text.find("\n## ", start + 1)] if "\n## " in text[start + 1 :] else text[start:]
        options = [f"| `{option.name}` | `{option.default}` | " for option in entry.options]
        for part in (entry.summary, entry.formula, *entry.prose, *options, entry.use, entry.source):
            assert part in own, f"{entry.name} has changed: {REWRITE}"


def test_the_pages_in_docs_are_those_of_the_groups_with_every_patch_once():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in DOCS.iterdir()} == {
        "README.md",
        catalogue_pages.COMPOSED.page,
        *(group.page for group in GROUPS.values()),
    }
    for entry in catalogue_text.read_all().values():
        link = f"| [`{entry.name}`]({GROUPS[entry.group].page}#{catalogue_pages.slug(entry.name)}) | "
        assert index.count(link) == 1, REWRITE
    for spec in plan.compositions():
        link = f"| [`{spec}`]({catalogue_pages.COMPOSED.page}#{catalogue_pages.slug(spec)}) | "
        assert index.count(link) == 1, REWRITE


def test_pages_without_results_invent_nothing():
    pages = write({})
    assert "has a\nperplexity of not measured before and not measured after" in pages["README.md"]
    assert pages["README.md"].count("**Original**, untouched: not measured. ") == 1
    assert "| `fading` | not measured | not measured |" in pages["feature-maps.md"]


def test_a_pipe_does_not_break_a_table():
    entry = dataclasses.replace(read(make()), summary="A | B")
    pages = catalogue_pages.pages({"fading": entry}, {}, {}, {}, Settings(), "m", "d")
    for text, bars in ((pages["feature-maps.md"], 9), (pages["README.md"], 8)):
        row = next(line for line in text.splitlines() if line.startswith("| [`fading`]"))
        assert row.count("|") == bars


def test_a_key_changes_with_code_and_options_but_not_with_words(tmp_path, monkeypatch):
    path = tmp_path / "patch.py"
    monkeypatch.setattr(plan.inspect, "getsourcefile", lambda cls: str(path))

    def key(code, **options):
        path.write_text(code)
        return key_of(Subject("elu1", "elu1", options), Settings(), "a/m", "b/d")

    first = key('"""Doc."""\nclass A:\n    """Doc."""\n    x = 1  # why\n')
    assert key('"""Other."""\nclass A:\n    """Words."""\n\n    x = 1\n') == first
    assert key("class A:\n    x = 2\n") != first
    assert key("class A:\n    x = 1\n", power=2) != first
    assert json.loads(json.dumps(first)) == first


def test_compositions_need_all_their_parts(monkeypatch):
    monkeypatch.setattr(plan, "COMPOSITIONS", {"softmax1+logn": "a", "softmax1+nowhere": "b"})
    assert plan.compositions() == {"softmax1+logn": "a"}
    subjects = plan.subjects()
    assert list(subjects)[:2] == [ORIGINAL, CONTROL]
    assert subjects["softmax1+logn"].patch == "softmax1+logn"
    assert [part.name for part in subjects["softmax1+logn"].parts] == ["softmax1", "logn"]


STORY = "Once upon a time there was {n} and {n}.\n\nIt said {m}. " + "The end came slowly, as ends do. " * 6


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model and two texts."""
    root = tmp_path_factory.mktemp("catalogue")
    (root / "texts").mkdir()
    for name, count in (("train_sample.txt", 12), ("val.txt", 4)):
        text = "\n".join(STORY.format(n=n, m=n * n) for n in range(count))
        (root / "texts" / name).write_text(text, encoding="utf-8")
    make_folder(root / "model")
    return root


SMALL = Settings(steps=2, batch_size=2, block_size=16, length=32, max_tokens=256)


def start(place, work):
    model, data = str(place / "model"), place / "texts"
    catalogue_measure.prepare_texts(data, work)
    return model, str(data)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_measuring_goes_on_where_it_stopped(place, tmp_path, monkeypatch):
    model, data = start(place, tmp_path)
    held_out = (tmp_path / "held_out.jsonl").read_text().splitlines()
    assert [json.loads(row)["text"][:16] for row in held_out] == ["Once upon a time"] * 4
    subject, calls, real = Subject("elu1", "elu1"), [], catalogue_measure._perplexity

    def counted(words):
        calls.append(Path(words[words.index("--output-dir") + 1]).name)
        return real(words)

    monkeypatch.setattr(catalogue_measure, "_perplexity", counted)
    run = finetune.finetune

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "finetune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        catalogue_measure.measure(subject, SMALL, model, data, tmp_path)
    assert plan.load_result(tmp_path, "elu1") is None
    before = tmp_path / "subjects" / "elu1" / "before" / "results.json"
    written = before.stat().st_mtime_ns
    monkeypatch.setattr(finetune, "finetune", run)
    catalogue_measure.measure(subject, SMALL, model, data, tmp_path)
    assert calls == ["before", "before", "after"]
    assert before.stat().st_mtime_ns == written  # found, not measured again
    result = plan.load_result(tmp_path, "elu1")
    assert result["tokens"] == 2 * 2 * 16
    assert result["before"]["perplexity"] != result["after"]["perplexity"]
    assert result["model"]["layers"] == [{**LAYER, "state_bytes": 4 * 2 * 8 * 9}] * 2
    assert result["key"] == key_of(subject, SMALL, model, data)
    # the same weights without a patch, by the command as a user would start it
    words = catalogue_measure.perplexity_words(
        SMALL, model, str(tmp_path / "held_out.jsonl"), str(tmp_path / "p")
    )
    assert real([*words, "--patch", "elu1"]) == result["before"]
    # other settings are another measurement
    other = dataclasses.replace(SMALL, max_tokens=128)
    catalogue_measure.forget(tmp_path, subject, key_of(subject, SMALL, model, data), again=False)
    assert plan.load_result(tmp_path, "elu1") is not None
    catalogue_measure.forget(tmp_path, subject, key_of(subject, other, model, data), again=False)
    assert plan.load_result(tmp_path, "elu1") is None


def test_the_command(place, tmp_path, monkeypatch, capsys):
    started, broken = [], ["softmax1"]

    def run_jobs(jobs, logs, at_once, environment):
        assert at_once == 3
        for job in jobs:
            if not job.finished():
                started.append(job.name)
                assert job.command[1:3] == ["-m", "tools.catalogue"]
                assert catalogue.main(job.command[3:]) == 0
                assert job.finished()

    def measured(subject, *arguments):
        if subject.name in broken:
            raise RuntimeError("no\nluck")
        return RESULTS.get(subject.name, RESULTS["fading"])

    monkeypatch.setattr(catalogue, "run_jobs", run_jobs)
    monkeypatch.setattr(catalogue_measure, "_measured", measured)
    pages = tmp_path / "pages"
    words = ["--model", str(place / "model"), "--work-dir", str(tmp_path / "w"), "--jobs", "3"]
    assert catalogue.main([*words, "--data", str(tmp_path)]) == 1
    assert "has no train_sample.txt: --data is a folder with" in capsys.readouterr().err
    words += ["--data", str(place / "texts")]
    assert catalogue.main([*words, "--output", str(pages)]) == 1
    assert started == list(plan.subjects())
    assert "softmax1 failed: RuntimeError: no luck" in capsys.readouterr().err
    assert {path.name for path in pages.iterdir()} == {path.name for path in DOCS.iterdir()}
    assert "| failed | failed |" in (pages / "scores.md").read_text(encoding="utf-8")
    # only what failed is measured again
    started.clear()
    broken.clear()
    assert catalogue.main([*words, "--output", str(pages)]) == 0
    assert started == ["softmax1"]
    assert "failed" not in (pages / "scores.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert catalogue.main([*words, "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "elu1: measured" in listed
    assert "linformer: bidirectional only" in listed


def test_the_readme_counts_them():
    count = sum(cls.__module__.startswith("hf_linattn.patches") for cls in registry.patches().values())
    assert f"{count} patches" in (ROOT / "README.md").read_text(encoding="utf-8")
