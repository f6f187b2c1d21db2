"""--compare of the perplexity command: entries, refusals, the same numbers as separate runs, resuming."""

from __future__ import annotations

import json

import pytest
from helpers.fixtures_perplexity import curve, make_folder, make_texts
from transformers import AutoTokenizer

from hf_linattn import from_pretrained, patch_model, registry
from hf_linattn.attention import ScoreAttention
from hf_linattn.errors import DataError, OptionError, UnsupportedCallError
from hf_linattn.eval.common import model_specs, nll
from hf_linattn.eval.common.markdown import between, write_between
from hf_linattn.eval.common.model_specs import parse_spec, parse_specs
from hf_linattn.eval.common.plotting import look
from hf_linattn.eval.perplexity import plot
from hf_linattn.eval.perplexity.__main__ import main
from hf_linattn.eval.perplexity.plot import curve_table

EXTRA = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


@pytest.fixture
def register_here():
    """`register`, forgotten after the test."""
    known = dict(registry._PATCHES)
    yield registry.register
    for name in registry._PATCHES.keys() - known.keys():
        del registry._PATCHES[name]


def run(folder, data, out, *extra):
    words = ["--model", folder, "--data", data, "--output-dir", out, *EXTRA, *extra]
    return main([str(word) for word in words])


def results(out):
    return json.loads((out / "results.json").read_text())


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("softmax", ("softmax", {}, None)),
        ("softmax1+logn", ("softmax1+logn", {}, None)),
        ("softmax@yarn:8", ("softmax", {}, "yarn:8")),
        ("window:size=256:sinks=4", ("window", {"size": 256, "sinks": 4}, None)),
        ("logn:kappa=0.2:clip=true@linear:4", ("logn", {"kappa": 0.2, "clip": True}, "linear:4")),
        ("logn:train_length=config", ("logn", {"train_length": "config"}, None)),
        ("a+b:a.x=1:y=null", ("a+b", {"a": {"x": 1}, "y": None}, None)),
        ('a:x=[1,2]:y={"b":[3,4]}', ("a", {"x": [1, 2], "y": {"b": [3, 4]}}, None)),
    ],
)
def test_an_entry(text, want):
    assert parse_spec(text) == want


def test_commas_between_entries_and_in_values():
    assert parse_specs("softmax, a:x=[1,2],b@yarn:2") == ["softmax", "a:x=[1,2]", "b@yarn:2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no patch"),
        ("softmax,,logn", "names no patch"),
        ("@yarn:8", "model's own attention is 'softmax'"),
        ("yarn:8", "'8' is no OPTION=VALUE.*yarn@8"),
        ("softmax:yarn:8", "'yarn' is no OPTION=VALUE"),
        ("logn:kappa=", "is no OPTION=VALUE"),
        ("logn:kappa=1:kappa=2", "'kappa' twice"),
        ("softmax@", "unknown RoPE scaling ''"),
        ("softmax@ntk:2", "linear, dynamic, yarn"),
        ("softmax@yarn:x", "number of at least 1"),
        ("unpatched", "'softmax'"),
        ("window:size=8,sinks=4", "'sinks=4' is no patch.*options behind colons"),
    ],
)
def test_an_entry_that_cannot_be_read(text, words):
    with pytest.raises(OptionError, match=words):
        parse_specs(text)


def test_equals_separate_runs_to_the_last_bit(folder, data, tmp_path, capsys):
    entries = {
        "elu1": ("--patch", "elu1"),
        "softmax1+logn:train_length=64": ("--patch", "softmax1+logn", "--options", '{"train_length": 64}'),
        "softmax@yarn:4": ("--rope-scaling", "yarn:4"),
        "logn@dynamic:2": ("--patch", "logn", "--rope-scaling", "dynamic:2"),
        "softmax": (),  # last: nothing of the others may be left
    }
    assert run(folder, data, tmp_path / "all", "--compare", ",".join(entries), "--baseline", folder) == 0
    printed = capsys.readouterr().out
    rows = results(tmp_path / "all")["rows"]
    assert list(dict.fromkeys(row["model"] for row in rows)) == [*entries, folder.name]
    for index, (entry, extra) in enumerate(entries.items()):
        assert run(folder, data, tmp_path / str(index), *extra) == 0
        alone = [{**row, "model": entry} for row in results(tmp_path / str(index))["rows"]]
        assert [row for row in rows if row["model"] == entry] == alone
        assert f"\n{entry} " in printed
    assert curve(rows[-2:]) == curve(rows[-4:-2])  # the baseline is the model itself
    assert len(set(curve(rows))) == len(rows) - 2
    assert (tmp_path / "all" / "perplexity.png").read_bytes()[:4] == b"\x89PNG"


def test_random_maps_are_those_of_weights_loaded_anew(folder, data, tmp_path, monkeypatch):
    options = {"performer": '{"features": 8}', "hedgehog": "{}", "t2r": "{}"}
    alone = []
    for name, text in options.items():
        extra = ("--patch", name, "--options", text, "--seed", "3")
        assert run(folder, data, tmp_path / name, *extra) == 0
        alone += curve(results(tmp_path / name)["rows"])
    loaded, load = [], model_specs.load_model
    monkeypatch.setattr(model_specs, "load_model", lambda *a, **k: loaded.append(a) or load(*a, **k))
    entries = "performer:features=8,hedgehog,t2r"
    assert run(folder, data, tmp_path / "all", "--compare", entries, "--seed", "3") == 0
    assert curve(results(tmp_path / "all")["rows"]) == alone
    assert len(loaded) == 1
    assert run(folder, data, tmp_path / "other", "--compare", entries, "--seed", "4") == 0
    assert curve(results(tmp_path / "other")["rows"])[-2:] != alone[-2:]


def test_resumes_after_the_last_length(folder, data, tmp_path, monkeypatch):
    compare = ("--compare", "softmax,logn:kappa=0.5", "--compare", "elu1")
    assert run(folder, data, tmp_path / "whole", *compare) == 0
    real, broken, seen = nll.forward, tmp_path / "broken", []

    def interrupted(model, ids, *args, **kwargs):
        seen.append(ids.shape[1])
        if len(seen) == 11:  # 4 windows at each of 2 lengths, then the third of the second curve
            raise KeyboardInterrupt
        return real(model, ids, *args, **kwargs)

    monkeypatch.setattr(nll, "forward", interrupted)
    assert run(folder, data, broken, *compare) == 130
    assert curve(results(broken)["rows"], "model") == ["softmax", "softmax"]
    monkeypatch.setattr(nll, "forward", real)
    used, use = [], model_specs.ModelLoader.use
    monkeypatch.setattr(
        model_specs.ModelLoader, "use", lambda s, spec: used.append(spec.label) or use(s, spec)
    )
    assert run(folder, data, broken, *compare) == 0
    assert used == ["softmax", "logn:kappa=0.5", "elu1", "logn:kappa=0.5", "elu1"]  # checked, then measured
    assert results(broken)["rows"] == results(tmp_path / "whole")["rows"]
    assert run(folder, data, broken, "--compare", "softmax") == 1  # another question


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--compare", "softmax,logn", "--patch", "elu1"), 2, "--patch has no meaning with --compare"),
        (("--compare", "logn", "--options", "{}"), 2, "--options has no meaning with --compare"),
        (("--compare", "logn", "--rope-scaling", "yarn:2"), 2, "write --compare softmax@yarn:2"),
        (("--compare", "logn", "--baseline", "unpatched"), 2, "its name there is softmax"),
        (("--compare", "logn:x"), 2, "OPTION=VALUE"),
        (("--compare", "logn,logn"), 2, "'logn' twice"),
        (("--compare", "logn:kappa=1:clip=true,logn:clip=true:kappa=1"), 2, "'logn:kappa=1:clip=true' twice"),
        (
            ("--compare", "softmax,sofmax1"),
            1,
            "error: sofmax1: unknown patch 'sofmax1'. Did you mean 'softmax1'?",
        ),
        (("--compare", "softmax,logn:kapa=1"), 1, "error: logn:kapa=1: "),
        (("--compare", "softmax,logn:train_length=1"), 1, "at least 2 tokens"),
        (("--compare", "softmax,elu1+softmax1"), 1, "error: elu1+softmax1: "),
    ],
)
def test_refusals_come_before_any_measuring(folder, data, tmp_path, capsys, extra, status, words):
    try:
        code = run(folder, data, tmp_path / "out", *extra)
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == status
    assert words in message
    assert not (tmp_path / "out").exists()


def test_a_stream_takes_linear_entries_only(folder, data, tmp_path, capsys):
    words = ["--model", folder, "--data", data, "--stream", "--max-tokens", "256"]
    words = [str(word) for word in words]
    out = ["--output-dir", str(tmp_path / "out")]
    assert main([*words, *out, "--compare", "elu1,softmax1"]) == 1
    assert "error: softmax1: --stream needs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, *out, "--compare", "elu1,elu1+logn"]) == 0
    assert len(results(tmp_path / "out")["rows"]) == 2 * len(
        [row for row in results(tmp_path / "out")["rows"] if row["model"] == "elu1"]
    )


def test_what_is_refused_in_a_call_is_found_up_front(folder, data, tmp_path, capsys, register_here):
    @register_here("moody")
    class Moody(ScoreAttention):
        """Refuses every call."""

        def weights(self, scores, mask, sink):
            raise UnsupportedCallError("not today")

    assert run(folder, data, tmp_path / "out", "--compare", "softmax,moody") == 1
    assert "error: moody: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_fails_while_measuring_is_named(folder, data, tmp_path, capsys, register_here):
    @register_here("brittle")
    class Brittle(ScoreAttention):
        """Overflows on long input."""

        def weights(self, scores, mask, sink):
            weights = super().weights(scores, mask, sink)
            return weights if scores.shape[-1] < 100 else weights + float("inf")

    assert run(folder, data, tmp_path / "out", "--compare", "softmax,brittle,elu1") == 1
    assert "error: brittle: the model's loss is not finite at length 128" in capsys.readouterr().err
    assert curve(results(tmp_path / "out")["rows"], "model") == ["softmax", "softmax", "brittle"]


def test_a_folder_with_a_patch(folder, data, tmp_path, capsys, register_here):
    import torch

    @register_here("sink_of_a_test")
    class Scaled(ScoreAttention):
        """A learned sink."""

        def __init__(self, site):
            super().__init__(site)
            self.logit = torch.nn.Parameter(torch.zeros(site.heads))

        def sink_logit(self, query):
            return self.logit

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("elu1", "sink_of_a_test"):
        patch_model(from_pretrained(str(folder)), name).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    # without weights of its own nothing is lost: the entries replace it
    assert run(tmp_path / "elu1", data, tmp_path / "a", "--compare", "softmax,elu1") == 0
    assert run(folder, data, tmp_path / "b", "--compare", "softmax,elu1") == 0
    assert results(tmp_path / "a")["rows"] == results(tmp_path / "b")["rows"]
    capsys.readouterr()
    assert run(tmp_path / "sink_of_a_test", data, tmp_path / "c", "--compare", "softmax,elu1") == 1
    assert "weights of its own" in capsys.readouterr().err


def test_many_curves_can_be_told_apart(tmp_path):
    looks = [tuple(look(index).values()) for index in (None, *range(24))]
    assert len(set(looks)) == 25
    assert len({colour for colour, *_ in looks[:13]}) == 13
    rows = [
        {"model": f"patch{n}:size={n}", "length": length, "perplexity": 10.0 + n * length, "stderr": None}
        for n in range(12)
        for length in (512, 1024)
    ]
    for kind, head in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        plot.save_plot(tmp_path / f"a.{kind}", rows, 512, reference={"patch0:size=0"}, kind=kind)
        assert (tmp_path / f"a.{kind}").read_bytes().startswith(head)
    plot.save_plot(tmp_path / "b.svg", rows, 512, reference={"patch0:size=0"}, kind="svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    lines = curve_table(rows[:-1]).splitlines()
    assert len(lines) == 13
    assert lines[0].split()[-2:] == ["512", "1024"]
    assert lines[-1].split() == ["patch11:size=11", "5642", "-"]


def test_only_what_is_between_the_marks_of_a_page_is_written_again(tmp_path):
    page, marks = tmp_path / "page.md", ("<!-- a -->", "<!-- end of a -->")
    assert between(page, marks) == ""
    write_between(page, marks, "one", "# New\n\n")
    assert page.read_text() == "# New\n\n<!-- a -->\n\none\n<!-- end of a -->\n"
    page.write_text(f"{page.read_text()}\nby hand\n")
    write_between(page, marks, "two", "# Newer\n\n")
    assert page.read_text() == "# New\n\n<!-- a -->\n\ntwo\n<!-- end of a -->\n\nby hand\n"
    page.write_text("nothing")
    with pytest.raises(DataError, match="has no lines"):
        write_between(page, marks, "three", "")
    assert page.read_text() == "nothing"


def test_tiny_model_without_rope_refuses_scaling(tmp_path, data, capsys, folder):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=128, bos_token_id=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    extra = ("--tokenizer", folder, "--compare", "softmax,softmax@yarn:2")
    assert run(tmp_path / "gpt2", data, tmp_path / "out", *extra) == 1
    assert "error: softmax@yarn:2: GPT2LMHeadModel has no RoPE to scale" in capsys.readouterr().err
