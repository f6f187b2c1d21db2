"""The script that teaches recall: its rows keep their promise, and it trains, stops, goes on and refuses."""

import json
from types import SimpleNamespace

import numpy as np
import pretrain_recall
import pytest
import recall_rows
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_linattn.training import loop as training

SENTENCE = "The cat sat on the mat, and the dog ran after the cat; who was faster? "
ORDINARY = np.arange(5, 400, dtype=np.int32)
KINDS = ("random_repeats", "text_repeats", "key_values", "second_copy")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("recall") / "text.txt"
    path.write_text(SENTENCE * 40)
    return path


@pytest.fixture
def command(tiny_model, text):
    def run(output, *more):
        required = ["--model", str(tiny_model), "--data", str(text), "--cpu"]
        sizes = ["--output-dir", str(output), "--steps", "6", "--context", "32", "--batch-size", "2"]
        return pretrain_recall.main([*required, *sizes, *more])

    return run


@pytest.mark.parametrize("width", [16, 32, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_known_tokens_follow_from_those_before(kind, width):
    text = np.arange(400, 400 + width, dtype=np.int32)
    for seed in range(20):
        before = text.copy()
        ids, known = getattr(recall_rows, kind)(np.random.default_rng(seed), text, ORDINARY)
        assert (text == before).all()
        assert ids.shape == known.shape == (width,)
        assert known.any()
        assert not known[0]
        # with as many tokens before it as say enough, each of them was read already
        size = 3 if kind == "text_repeats" else 2
        pieces = [tuple(ids[end - size : end].tolist()) for end in range(size, width + 1)]
        for place in np.flatnonzero(known):
            here = place - size + 1
            assert pieces[here] in pieces[:here], (seed, place)


def test_random_repeats_hold_one_segment_over_and_over():
    distances = set()
    for seed in range(40):
        # so many tokens that none comes twice by chance
        ids, known = recall_rows.random_repeats(np.random.default_rng(seed), ORDINARY[:128], np.arange(10**6))
        sources = [ids.tolist().index(ids[place]) for place in np.flatnonzero(known)]
        copied = sorted(set(sources))
        assert copied == list(range(copied[0], copied[-1] + 1))
        assert 15 <= len(copied) <= 63
        repeated = [place for place in range(128) if ids.tolist().index(ids[place]) < place]
        heads = [place for place in repeated if ids[place] == ids[copied[0] - 1]]
        assert sorted([*np.flatnonzero(known), *heads]) == repeated
        distances.add(int(np.flatnonzero(known)[0]) - sources[0])
    assert len(distances) > 20


def test_key_values_are_asked_for_what_the_list_says():
    asked = 0
    for seed in range(60):
        # text of -1 shows where the list ends when there is something between it and the questions
        text = np.full(128, -1, dtype=np.int32)
        ids, known = recall_rows.key_values(np.random.default_rng(seed), text, ORDINARY)
        begin = int(np.argmax(ids == -1)) if (ids == -1).any() else None
        if begin is None:
            continue
        table = ids[:begin].tolist()
        places = np.flatnonzero(known)
        value = 2 if known[places[0] + 1] else 1
        question = int(np.flatnonzero(ids[:, None] == -1)[-1]) + 1
        lead = int(places[0]) - question  # key and what stands after it
        for place in range(int(places[0]), len(ids) - value, 1):
            if known[place] and not known[place - 1]:
                key = ids[place - lead : place].tolist()
                at = [i for i in range(begin - lead) if table[i : i + lead] == key]
                assert len(at) == 1
                assert table[at[0] + lead : at[0] + lead + value] == ids[place : place + value].tolist()
                asked += 1
    assert asked > 100


def test_rows_grow_and_depend_on_step_and_number_alone():
    made = recall_rows.Rows(ORDINARY, context=128, steps=400, seed=3)
    widths = [made.width(step) for step in range(1, 401)]
    assert widths == sorted(widths)
    assert [widths.count(width) for width in (16, 32, 64)] == [49, 25, 25]
    assert set(widths[100:]) == {128}
    blocks, numbers = np.tile(ORDINARY[:128], (3, 1)), np.array([7, 8, 9])
    whole = made.prepare(blocks, numbers, 60)
    assert whole.shape == (3 * 4, 2, 32)
    assert (made.prepare(blocks[1:2], numbers[1:2], 60) == whole[4:8]).all()
    assert (made.prepare(blocks, numbers, 61)[:, 0] != whole[:, 0]).any()
    validation = made.prepare(blocks, numbers, 0)
    assert (validation[:, 0] == blocks).all()
    assert (validation[:, 1, 1:] == blocks[:, 1:]).all()


def test_losses_are_those_of_the_known_tokens(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    known = [(0, 5), (0, 11), (1, 3)]
    targets = torch.full_like(ids, pretrain_recall.NO_TARGET)
    for row, place in known:
        targets[row, place] = ids[row, place]
    got = pretrain_recall.target_losses(model, torch.stack([ids, targets], 1))
    nats = -model(input_ids=ids).logits.log_softmax(-1)
    each = [nats[row, place - 1, ids[row, place]] for row, place in known]
    torch.testing.assert_close(got, torch.stack([(each[0] + each[1]) / 2, each[2]]))


class Copier(torch.nn.Module):
    """Says what came after the present token when it was last read; nothing new otherwise."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 20_000)
        for row, ids in enumerate(input_ids.tolist()):
            after = {}
            for place, (token, following) in enumerate(zip(ids, [*ids[1:], 0], strict=True)):
                logits[row, place, after.get(token, 0)] = 1
                after[token] = following
        return SimpleNamespace(logits=logits)


def test_measured_recall_is_that_of_a_perfect_copier():
    # text without repeats, and so many ordinary tokens that few come twice by chance
    blocks, ordinary = np.arange(1, 65, dtype=np.int32)[None], np.arange(100, 20_000, dtype=np.int32)
    shares = pretrain_recall.measure(Copier(), blocks, ordinary)
    assert list(shares) == ["second_copy", "random_repeats", "text_repeats", "key_values"]
    assert shares["second_copy"] == 1
    assert shares["random_repeats"] == 1
    assert 0.9 < shares["text_repeats"] <= 1
    assert 0.1 < shares["key_values"] < 1  # keys of two tokens, and marks before values, are beyond it


def test_it_trains_and_a_stopped_run_ends_the_same(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrain_recall, "CHECKPOINT_EVERY", 2)
    assert command(tmp_path / "whole") == 0
    out = capsys.readouterr().out
    assert "second_copy" in out
    record = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert record["tokens"] == 6 * 2 * 32
    assert record["text_loss"] < record["text_loss_before"]
    assert (tmp_path / "whole" / "recall.png").stat().st_size > 1000
    assert not (tmp_path / "whole" / "checkpoint").exists()
    step = training.TrainingLoop._train_step

    def stop_at_five(loop):
        if loop.step == 5:
            raise KeyboardInterrupt
        return step(loop)

    monkeypatch.setattr(training.TrainingLoop, "_train_step", stop_at_five)
    assert command(tmp_path / "parts") == 130
    monkeypatch.setattr(training.TrainingLoop, "_train_step", step)
    assert command(tmp_path / "parts") == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    curves = [(tmp_path / name / "recall.csv").read_text() for name in ("whole", "parts")]
    assert curves[0] == curves[1]
    assert len(curves[0].splitlines()) == 1 + 4


def test_a_new_model_from_a_tokenizer(tiny_model, text, tmp_path):
    # the tokenizer's 257 tokens, context 512 of the new model
    output = ["--output-dir", str(tmp_path / "new"), "--steps", "1", "--context", "16", "--batch-size", "1"]
    source = ["--tokenizer", str(tiny_model), "--data", str(text), "--cpu"]
    assert pretrain_recall.main([*source, *output]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert model.config.vocab_size == 257
    assert model.config.head_dim == 32


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tokenizer", "x"], "one of them"),
        (["--context", "48"], "--context must be 16, 32, 64, ... up to the model's 64 tokens, not 48"),
        (["--context", "128"], "not 128"),
        (["--steps", "0"], "--steps must be above 0"),
        (["--batch-size", "-1"], "--batch-size must be above 0"),
        (["--data", "/nowhere"], "no such file or folder"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_calls_say_what_to_do(command, tmp_path, capsys, more, words):
    assert command(tmp_path / "out", *more) == 1
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert words in err
    assert not (tmp_path / "out").exists()


def test_other_arguments_and_other_models_are_refused(command, tmp_path, tiny_model, capsys):
    assert command(tmp_path / "out", "--steps", "1") == 0
    assert command(tmp_path / "out", "--steps", "1") == 0  # finished: the same figures again
    assert command(tmp_path / "out", "--steps", "2") == 1
    assert "other arguments" in capsys.readouterr().err
    assert command(tiny_model) == 1
    assert "another origin" in capsys.readouterr().err
