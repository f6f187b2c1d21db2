"""Perplexity against plain loops that share no line with it."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.fixtures_perplexity import TEXTS, curve, make_folder
from helpers.real_data import DATA, needs_data
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_linattn import from_pretrained, is_patched, patch_model
from hf_linattn.errors import DataError, LinattnError, OptionError
from hf_linattn.eval.common.models import ModelSpec, load_model
from hf_linattn.eval.common.windows import encode, plan_windows
from hf_linattn.eval.perplexity import measure as scoring


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder):
    return from_pretrained(str(folder)).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def token_nats(model, ids):
    """Nats of ids[1:] given the tokens before them, in float64."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    return [(logits[i].logsumexp(0) - logits[i, ids[i + 1]]).item() for i in range(len(ids) - 1)]


def test_same_tokens_match_a_plain_loop(model, tokenizer):
    rows = scoring.measure(model, tokenizer, TEXTS, [64, 128, 256], stride=32, max_tokens=None, batch_size=3)
    for row in rows:
        sums, counts = {}, {}
        for number, text in enumerate(TEXTS):
            ids = [256, *tokenizer(text)["input_ids"][1:]]
            for end in range(256, len(ids) + 1, 32):
                values = token_nats(model, ids[end - row.length : end])[-32:]
                sums[number] = sums.get(number, 0) + sum(values)
                counts[number] = counts.get(number, 0) + 32
        mean = sum(sums.values()) / sum(counts.values())
        assert row.tokens == sum(counts.values()) > 1000
        assert abs(row.bytes - row.tokens) <= 3  # a token is a byte, but for characters that a window cuts
        assert row.windows == row.tokens // 32
        assert row.nats == pytest.approx(mean, rel=1e-5)
        assert row.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
        assert row.documents == 3
        assert row.stderr_over == "documents"
        squares = sum((sums[k] - mean * counts[k]) ** 2 for k in sums)
        assert row.stderr == pytest.approx(math.exp(mean) * math.sqrt(3 / 2 * squares) / row.tokens, rel=1e-3)
        assert [(b.start, b.end, b.tokens) for b in row.buckets] == [
            (row.length - 32, row.length, row.tokens)
        ]


def test_windows_side_by_side_match_a_plain_loop(model, tokenizer):
    row = scoring.measure(model, tokenizer, TEXTS[:1], [100], stride="full", max_tokens=None, bos="no")[0]
    ids = tokenizer(TEXTS[0])["input_ids"][1:]
    values = [token_nats(model, ids[start : start + 100]) for start in range(0, len(ids) - 99, 100)]
    sums = [sum(window) for window in values]
    mean = sum(sums) / (99 * len(sums))
    assert row.nats == pytest.approx(mean, rel=1e-5)
    assert row.tokens == 99 * len(sums)
    assert row.stderr_over == "windows"
    squares = sum((value - mean * 99) ** 2 for value in sums) * len(sums) / (len(sums) - 1)
    assert row.stderr == pytest.approx(math.exp(mean) * math.sqrt(squares) / row.tokens, rel=1e-3)
    early = [value for window in values for value in window[:63]]
    assert [(b.start, b.end) for b in row.buckets] == [(1, 64), (64, 100)]
    assert row.buckets[0].nats == pytest.approx(sum(early) / len(early), rel=1e-5)


def test_a_budget_is_spread_over_documents(tokenizer):
    texts = encode(tokenizer, TEXTS)
    plan = plan_windows(texts, [64, 128], stride=32, max_tokens=32 * 7)
    short, long = plan.windows(64), plan.windows(128)
    assert [(w.document, w.end, w.scored) for w in short] == [(w.document, w.end, w.scored) for w in long]
    assert [(w.document, w.end) for w in long] == [
        (0, 128), (0, 160), (0, 192), (1, 128), (1, 160), (2, 128), (2, 160)
    ]  # fmt: skip


def test_bytes_are_those_of_the_text(tokenizer):
    document = encode(tokenizer, ["aé日𝄞b"]).documents[0]
    assert len(document) == 12
    # BOS has none, and a character split over tokens counts in the first of them
    assert document.byte_ends.tolist() == [0, 1, 3, 3, 6, 6, 6, 10, 10, 10, 10, 11]
    assert document.bytes_between(2, 5) == 5
    joined = encode(tokenizer, ["aé", "日"], join=True).documents
    assert [d.ids.tolist().count(256) for d in joined] == [2]
    assert joined[0].byte_ends.tolist() == [0, 1, 3, 3, 3, 6, 6, 6]


@pytest.mark.parametrize(("bos", "head"), [("auto", 256), ("yes", 256), ("no", None), ("window", 256)])
def test_bos(model, tokenizer, bos, head):
    row = scoring.measure(model, tokenizer, TEXTS[:1], [64], stride=63, max_tokens=126, bos=bos)[0]
    ids = [256] * (head is not None) + tokenizer(TEXTS[0])["input_ids"][1:]
    second = [256, *ids[64:127]] if bos == "window" else ids[63:127]
    want = sum(token_nats(model, ids[:64])) + sum(token_nats(model, second))
    assert row.nats == pytest.approx(want / 126, rel=1e-5)


@pytest.mark.parametrize("segment", [1000, 37])
def test_stream_equals_one_forward_pass(folder, tokenizer, segment):
    linear = patch_model(from_pretrained(str(folder)), "elu1").eval()
    texts = encode(tokenizer, TEXTS)
    rows = scoring.score_stream(linear, texts, max_tokens=4 * 500, segment=segment)
    assert curve(rows, "length") == [64, 128, 256, 500]
    values = [token_nats(linear, document.ids[:500].tolist()) for document in texts.documents]
    for low, row in zip([1, 64, 128, 256], rows, strict=True):
        want = [v for document in values for v in document[low - 1 : row.length - 1]]
        assert row.tokens == len(want)
        assert row.nats == pytest.approx(sum(want) / len(want), rel=1e-4)


@pytest.mark.parametrize("scaling", ["linear:2", "dynamic:2", "yarn:4"])
def test_rope_scaling_is_that_of_transformers(folder, tokenizer, scaling):
    kind, factor = scaling.split(":")
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": float(factor)}
    config.standardize_rope_params()
    lengths = {"lengths": [64, 128], "stride": 16, "max_tokens": 64}
    scaled = load_model(ModelSpec("x", str(folder), rope_scaling=scaling))
    got = [curve(scoring.measure(scaled, tokenizer, TEXTS, **lengths)) for _ in range(2)]
    for length, first, second in zip([64, 128], *got, strict=True):
        # dynamic NTK remembers the longest input: a fresh model has none to remember
        fresh = AutoModelForCausalLM.from_pretrained(folder, config=config)
        plan = plan_windows(encode(tokenizer, TEXTS), [64, 128], stride=16, max_tokens=64)
        assert first == second == scoring.score_length(fresh, plan, length).perplexity
    plain = scoring.measure(from_pretrained(str(folder)), tokenizer, TEXTS, **lengths)
    assert curve(plain) != got[0]


def test_a_model_is_left_as_it_was(folder, tokenizer):
    model = from_pretrained(str(folder)).train()
    keys = list(model.state_dict())
    scoring.measure(model, tokenizer, TEXTS, [64], stride=32, max_tokens=64)
    assert model.training
    assert not is_patched(model)
    assert list(model.state_dict()) == keys
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lengths": [64, 1]}, OptionError, "at least 2"),
        ({"stride": 64}, OptionError, "below the smallest length, 64"),
        ({"stride": 0}, OptionError, "at least 1"),
        ({"max_tokens": 31}, OptionError, "32 tokens"),
        ({"batch_size": 0}, OptionError, "batch_size"),
        ({"documents": []}, DataError, "no text"),
        ({"documents": ["", ""]}, DataError, "every document is empty"),
        ({"lengths": [64, 4096]}, DataError, "4 documents reach 4096.*that fits is 64"),
    ],
)
def test_bad_input(model, tokenizer, change, error, words):
    arguments = {"documents": TEXTS, "lengths": [64, 128], "stride": 32, "max_tokens": 64} | change
    with pytest.raises(error, match=words):
        scoring.measure(model, tokenizer, **arguments)


def test_infinite_loss_is_refused(folder, tokenizer):
    model = from_pretrained(str(folder))
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(LinattnError, match="not finite at length 64: the weights hold NaN"):
        scoring.measure(model, tokenizer, TEXTS, [64], stride=32, max_tokens=64)


def test_a_tokenizer_with_more_tokens_than_the_model_is_named(folder, tokenizer):
    model = from_pretrained(str(folder))
    model.resize_token_embeddings(40)
    with pytest.raises(DataError, match=r"made token \d+ .* has 40 tokens: name the tokenizer"):
        scoring.measure(model, tokenizer, TEXTS, [64], stride=32, max_tokens=64)


@pytest.mark.full
@needs_data
def test_published_figures_of_books():
    """Emma, first 65,536 tokens, windows side by side; README of the data folder."""
    folder = str(DATA / "models" / "books-1m")
    text = (DATA / "text" / "books" / "eval" / "Emma.md").read_text(encoding="utf-8")
    rows = scoring.measure(
        from_pretrained(folder), AutoTokenizer.from_pretrained(folder), [text], [512, 1024], stride="full"
    )
    assert [round(row.perplexity, 2) for row in rows] == [31.10, 42.70]
    last = rows[0].buckets[-1]
    assert (last.start, last.end, round(last.perplexity, 1)) == (256, 512, 30.0)


@needs_data
def test_stories260k_matches_a_plain_loop():
    folder = str(DATA / "models" / "stories260k")
    text = (DATA / "text" / "tinystories" / "val.txt").read_text(encoding="utf-8")[:20000]
    model, tokenizer = from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = scoring.measure(model, tokenizer, [text], [128, 256], stride=64, max_tokens=256, batch_size=2)
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    for row in rows:
        values = [v for e in (256, 320, 384, 448) for v in token_nats(model, ids[e - row.length : e])[-64:]]
        assert row.nats == pytest.approx(sum(values) / 256, rel=1e-5)
    start, end = encoded["offset_mapping"][191][1], encoded["offset_mapping"][447][1]
    assert rows[0].bytes == len(text[start:end].encode())
