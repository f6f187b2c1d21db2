"""A hybrid's window and its linear attention, each by itself: against their formulas, and what they score."""

import contextlib
import json

import pytest
import torch
from helpers import oracle, properties, tiny_models
from helpers.cases import CASES
from helpers.fixtures_perplexity import TEXTS, curve, make_folder, make_texts
from helpers.formulas.state import in_window
from helpers.oracle import Case, elu_plus_one, hedgehog_weights, over_its_sum, softmax_weights
from helpers.properties import check_decode, check_forward, check_gradient, check_packing, check_padding
from helpers.real_data import DATA, needs_data
from transformers import AutoTokenizer, StaticCache

from hf_linattn import bypassed, describe, from_pretrained, patch_model
from hf_linattn.errors import OptionError, UnsupportedModelError
from hf_linattn.eval.branches import main as former_main
from hf_linattn.eval.perplexity import compare_branches
from hf_linattn.eval.perplexity import run as perplexity_run
from hf_linattn.eval.perplexity.__main__ import main
from hf_linattn.eval.perplexity.branches import sentences
from hf_linattn.eval.perplexity.measure import measure
from hf_linattn.patching.contexts import hybrids, use_branches

SIMILARITY = {
    "window+elu1": lambda x: elu_plus_one(x.query) @ elu_plus_one(x.key).mT,
    "window+hedgehog": lambda x: hedgehog_weights(x, "window.rest."),
}
FORMULAS = {
    "window": lambda x, f: softmax_weights(x.scores(), in_window(x)) @ x.value,
    "rest": lambda x, f: over_its_sum(f, x.visible & ~in_window(x)) @ x.value,
    "linear": lambda x, f: over_its_sum(f, x.visible) @ x.value,
    "none": lambda x, f: torch.zeros_like(x.query @ x.key.mT @ x.value),
}
HYBRIDS = ("window+elu1", "window+elu1, learned", "window, hedgehog")
LENGTHS = (1, 25, 90)


@pytest.fixture(params=FORMULAS)
def branches(request, monkeypatch):
    """Every patched model of the suite computes with one branch, and so does its oracle."""
    name = request.param

    def patch(model, case):
        for module in hybrids(whole(model, case)).values():
            module.branches = name
        return model

    whole = properties.patch
    monkeypatch.setattr(properties, "patch", patch)
    for spec, similarity in SIMILARITY.items():
        one = FORMULAS[name]
        monkeypatch.setitem(oracle.FORMULAS, spec, lambda x, f=similarity, one=one: one(x, f(x)))
    monkeypatch.setitem(CASES, "window+decay", Case("window+decay", {"size": 16}))
    return name


class TestAgainstFormulas:
    @pytest.mark.parametrize(
        ("family", "case"),
        [*(("llama", case) for case in HYBRIDS), ("gemma3", HYBRIDS[0]), *(("bert", c) for c in HYBRIDS[:2])],
    )
    def test_forward_with_padding(self, family, case, branches):
        check_forward(family, case, LENGTHS)

    @pytest.mark.parametrize(("family", "case"), [("llama", c) for c in HYBRIDS] + [("bert", HYBRIDS[0])])
    def test_gradient(self, family, case, branches):
        check_gradient(family, case)

    @pytest.mark.parametrize("case", [*HYBRIDS, "window+decay"])
    def test_decoding_is_prefill(self, case, branches):
        check_decode("llama", case, (0, 3, 40, *range(41, 46), 100))

    def test_padding_and_packing_move_nothing(self, branches):
        check_padding("llama", "window+elu1")
        check_padding("bert", "window+elu1")
        check_packing("llama", "window+elu1, learned")


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def hybrid(size=16, **options):
    return patch_model(tiny_models.llama(), "window+elu1", options={"size": size, **options})


class TestUseBranches:
    def test_each_is_the_patch_of_its_name(self):
        ids = tiny_models.tokens(2, 70)
        model = hybrid()
        for branches, spec, options in (("window", "window", {"size": 16}), ("linear", "elu1", {})):
            want = logits(patch_model(tiny_models.llama(), spec, options=options), ids)
            with use_branches(model, branches):
                assert tiny_models.distance(logits(model, ids), want) < 1e-10

    def test_a_window_as_long_as_the_text_leaves_no_rest(self):
        model, ids = hybrid(64), tiny_models.tokens(1, 60)
        with use_branches(model, "rest"):
            rest = logits(model, ids)
        with use_branches(model, "none"):
            assert torch.equal(logits(model, ids), rest)
        with use_branches(model, "window"):
            assert tiny_models.distance(logits(model, ids), rest) > 1e-3

    def test_it_generates(self):
        model, ids = hybrid(), tiny_models.tokens(2, 20)
        for branches in ("window", "rest", "linear", "none"):
            with use_branches(model, branches):
                want = tiny_models.grow(model, ids, 12)
                assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), want)

    def test_it_ends_as_it_began(self):
        model, ids = hybrid(), tiny_models.tokens(1, 40)
        want = logits(model, ids)
        with contextlib.suppress(RuntimeError), use_branches(model, "rest"):
            with use_branches(model, "linear"):
                linear = logits(model, ids)
            assert tiny_models.distance(logits(model, ids), linear) > 1e-3
            raise RuntimeError
        assert torch.equal(logits(model, ids), want)

    def test_it_is_not_saved(self, tmp_path):
        model, ids = hybrid(), tiny_models.tokens(1, 40)
        want, before = logits(model, ids), describe(model)
        with use_branches(model, "none"):
            assert describe(model) == before
            model.save_pretrained(tmp_path)
        assert torch.equal(logits(from_pretrained(str(tmp_path), dtype=torch.float64), ids), want)

    def test_wrappers_parts_and_the_original_inside(self):
        model, ids = hybrid(), tiny_models.tokens(1, 40)
        original = logits(tiny_models.llama(), ids)
        with use_branches(torch.nn.ModuleList([model]), "none"):
            nothing = logits(model, ids)
            with bypassed(model):
                assert tiny_models.distance(logits(model, ids), original) < 1e-12
        with use_branches(model.model.layers[0], "none"):
            assert tiny_models.distance(logits(model, ids), nothing) > 1e-3

    def test_layers_without_a_hybrid_stay(self):
        model, ids = tiny_models.llama(), tiny_models.tokens(1, 40)
        patch_model(model, {"0": "softmax1", "1": ("window+elu1", {"size": 8})})
        assert list(hybrids(model)) == ["model.layers.1.self_attn.linattn.window"]
        want = logits(model, ids)
        with use_branches(model, "window"):
            assert tiny_models.distance(logits(model, ids), want) > 1e-3

    @pytest.mark.parametrize("spec", [None, "window", "elu1"])
    def test_a_model_without_hybrids_is_refused(self, spec):
        model = tiny_models.llama() if spec is None else patch_model(tiny_models.llama(), spec)
        with pytest.raises(UnsupportedModelError, match=r"no attention with two branches.*window\+elu1"):  # noqa: SIM117
            with use_branches(model, "window"):
                pass

    def test_unknown_branches_are_refused(self):
        model = hybrid()
        with pytest.raises(OptionError, match=r"unknown branches 'windows'. Did you mean 'window'\?"):  # noqa: SIM117
            with use_branches(model, "windows"):
                pass
        assert {module.branches for module in hybrids(model).values()} == {"both"}

    @torch.no_grad()
    def test_compiled_decoding_is_one_graph_for_each(self):
        """Whole texts are not compiled with a window: a graph cannot tell packed documents from padding."""
        torch._dynamo.reset()
        model = patch_model(tiny_models.llama(layers=1), "window+elu1", options={"size": 16})
        ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 34), 5)
        at, whole = tiny_models.positions(mask), torch.nn.functional.pad(mask, (0, 6))
        graphs = []

        def backend(graph, example):
            graphs.append(graph)
            return graph

        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for count, branches in enumerate(("both", "linear"), 1):
            with use_branches(model, branches):
                want = model(ids, attention_mask=mask, position_ids=at, use_cache=False).logits
                cache = StaticCache(config=model.config, max_cache_len=40)
                start = {"attention_mask": mask[:, :30], "position_ids": at[:, :30]}
                model(ids[:, :30], past_key_values=cache, **start)
                for i in range(30, 34):
                    step = whole.clone()
                    step[:, i + 1 :] = 0
                    part = {"position_ids": at[:, i : i + 1], "past_key_values": cache}
                    got = compiled(ids[:, i : i + 1], attention_mask=step, **part).logits[:, 0]
                    assert tiny_models.distance(got, want[:, i]) < 1e-9
            assert len(graphs) == count
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


def command(folder, data, out, *extra):
    words = ["--model", folder, "--data", data, "--output-dir", out, "--lengths", "64,128", "--stride", 32]
    words += [] if "--branches" in extra else ["--branches"]
    return [*map(str, words), "--max-tokens", "320", *map(str, extra)]


HYBRID = ("--patch", "window+elu1", "--options", '{"size": 16}')


class TestPerplexities:
    def test_each_is_that_of_the_patch_of_its_name(self, folder):
        tokenizer, options = AutoTokenizer.from_pretrained(folder), {"stride": 32, "max_tokens": 320}
        model = patch_model(from_pretrained(str(folder)), "window+elu1", options={"size": 16})
        every = ("both", "window", "linear", "rest", "none")
        found = compare_branches(model, tokenizer, TEXTS, [64, 128], branches=every, **options)
        assert list(found) == list(every)
        for name, spec in (("both", "window+elu1"), ("window", "window"), ("linear", "elu1")):
            own = {} if spec == "elu1" else {"size": 16}
            other = patch_model(from_pretrained(str(folder)), spec, options=own)
            want = measure(other, tokenizer, TEXTS, [64, 128], **options)
            assert curve(found[name]) == pytest.approx(curve(want))
        nothing = patch_model(from_pretrained(str(folder)), "window", options={"size": 1})
        for layer in nothing.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        want = measure(nothing, tokenizer, TEXTS, [64, 128], **options)
        assert curve(found["none"]) == pytest.approx(curve(want))
        assert {module.branches for module in hybrids(model).values()} == {"both"}

    def test_command(self, folder, data, tmp_path, capsys):
        assert main(command(folder, data, tmp_path, *HYBRID)) == 0
        printed = capsys.readouterr().out
        stored = json.loads((tmp_path / "results.json").read_text())
        model = patch_model(from_pretrained(str(folder)), "window+elu1", options={"size": 16})
        options = {"stride": 32, "max_tokens": 320}
        want = compare_branches(model, AutoTokenizer.from_pretrained(folder), TEXTS, [64, 128], **options)
        for name, rows in want.items():
            assert curve([row for row in stored["rows"] if row["model"] == name]) == curve(rows)
        assert len(stored["rows"]) == 8
        assert stored["windows"] == [16]
        assert stored["sentences"] == sentences(stored["rows"], [16])
        assert all(sentence in printed for sentence in stored["sentences"])
        assert len((tmp_path / "results.csv").read_text().splitlines()) == 9
        assert (tmp_path / "branches.png").read_bytes()[:4] == b"\x89PNG"
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["branches.png", "results.csv", "results.json"]

    def test_the_former_command_says_how_it_is_called_now(self, folder, data, tmp_path, capsys):
        words = command(folder, data, tmp_path / "new", *HYBRID)
        assert main(words) == 0
        printed = capsys.readouterr().out
        words = [word for word in command(folder, data, tmp_path / "old", *HYBRID) if word != "--branches"]
        assert former_main(words) == 0
        told = capsys.readouterr()
        assert "python -m hf_linattn.eval.perplexity --branches" in told.err
        assert told.out.splitlines()[:-1] == printed.splitlines()[:-1]
        new, old = (json.loads((tmp_path / x / "results.json").read_text()) for x in ("new", "old"))
        assert new["rows"] == old["rows"]
        assert new["format"] == "hf_linattn.branches/1"
        assert main([*words, "--branches"]) == 0  # the same run

    def test_it_goes_on_after_the_last_finished_length(self, folder, data, tmp_path, monkeypatch, capsys):
        real, seen = perplexity_run.score_length, []

        def interrupted(model, plan, length, **kwargs):
            seen.append(length)
            if len(seen) == 4:
                raise KeyboardInterrupt
            return real(model, plan, length, **kwargs)

        monkeypatch.setattr(perplexity_run, "score_length", interrupted)
        words = command(folder, data, tmp_path, *HYBRID)
        assert main(words) == 130
        assert "goes on" in capsys.readouterr().err
        half = json.loads((tmp_path / "results.json").read_text())["rows"]
        assert main(words) == 0
        rows = json.loads((tmp_path / "results.json").read_text())["rows"]
        assert rows[:3] == half
        assert [(row["model"], row["length"]) for row in rows] == [
            (name, length) for name in ("both", "window", "rest", "none") for length in (64, 128)
        ]
        assert len(seen) == 9
        assert main(words) == 0
        assert len(seen) == 9

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ((), "has no attention with two branches"),
            (("--patch", "window"), "has no attention with two branches"),
            ((*HYBRID, "--lengths", "64,4096"), "0 of 4 documents reach 4096 tokens"),
            ((*HYBRID, "--data", "/nowhere"), "no such file or folder"),
            ((*HYBRID, "--model", "/nowhere"), "no such folder"),
            (("--patch", "window+cosine"), "can be negative"),
        ],
    )
    def test_failures_are_one_line(self, folder, data, tmp_path, capsys, extra, message):
        assert main(command(folder, data, tmp_path / "out", *extra)) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert message in error
        assert not (tmp_path / "out").exists()

    def test_encoders_are_refused(self, tmp_path, data, capsys):
        sizes = {**tiny_models.SIZES, "num_hidden_layers": 1, "head_dim": None, "vocab_size": 257}
        make_folder(tmp_path / "bert")
        (tmp_path / "bert" / "model.safetensors").unlink()
        patch_model(tiny_models.build("BertForMaskedLM", **sizes), "window+elu1").save_pretrained(
            tmp_path / "bert"
        )
        assert main(command(tmp_path / "bert", data, tmp_path / "out")) == 1
        assert "sees later tokens" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words",
        [
            ("--branches", "both,left"),
            ("--options", "{}"),
            ("--stride", "0"),
            ("--compare", "elu1"),
            ("--baseline", "unpatched"),
            ("--stream",),
        ],
    )
    def test_wrong_usage(self, folder, data, tmp_path, words):
        with pytest.raises(SystemExit) as stopped:
            main(command(folder, data, tmp_path, *words))
        assert stopped.value.code == 2

    @pytest.mark.parametrize(
        ("nats", "said"),
        [
            ((3.0, 3.005, 4.5, 5.0), "beside the window the linear attention adds nothing"),
            ((3.0, 3.005, 4.5, 5.0), "worth 2.000 nats per token; the window alone keeps 100% of that"),
            ((3.0, 4.5, 3.002, 5.0), "beside the linear attention the window adds nothing"),
            ((3.0, 3.5, 4.5, 5.0), "beside the window the linear attention is worth 0.500 nats"),
            ((4.0, 3.0, 4.5, 5.0), "the window alone is better than both, by 1.000 nats per token"),
            ((4.0, 3.0, 4.5, 5.0), "the linear attention harms"),
            ((4.0, 4.5, 3.0, 5.0), "the linear attention alone is better than both, by 1.000 nats"),
            ((4.0, 4.5, 4.5, 3.9), "attention is worth nothing: without it there are -0.100 nats"),
        ],
    )
    def test_sentences(self, nats, said):
        names = ("both", "window", "rest", "none")
        rows = [{"model": name, "length": 512, "nats": x} for name, x in zip(names, nats, strict=True)]
        (sentence,) = sentences(rows, [64])
        assert sentence.startswith("at 512 tokens ")
        assert said in sentence
        assert "nothing lies outside the window" in sentences(rows, [512])[0]
        assert sentences(rows[:3], [64]) == []


@needs_data
def test_a_real_hybrid_without_training():
    """The window alone does better than both, and both better than no attention."""
    folder = str(DATA / "models" / "books-1m")
    model = patch_model(from_pretrained(folder), "window+elu1", options={"size": 64})
    text = (DATA / "text" / "books" / "eval" / "Emma.md").read_text(encoding="utf-8")[:20000]
    found = compare_branches(model, AutoTokenizer.from_pretrained(folder), [text], [512], max_tokens=512)
    both, window, rest, none = (found[name][0].nats for name in ("both", "window", "rest", "none"))
    assert window < both - 0.5 < both < rest < none
