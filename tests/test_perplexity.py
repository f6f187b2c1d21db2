"""The perplexity command and metric against plain loops that share no line with them."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_linattn import from_pretrained, is_patched, patch_model
from hf_linattn.errors import DataError, LinattnError, OptionError
from hf_linattn.eval import length_perplexity, nats, perplexity, scoring
from hf_linattn.eval.loading import Curve, load_model
from hf_linattn.eval.windows import encode, plan_windows

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("HF_LINATTN_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "models").is_dir(), reason=f"no reference models: {DATA} (HF_LINATTN_DATA)"
)
TEXTS = ["Wörter – " + " ".join(f"{n * n % 97} é {n}" for n in range(k)) for k in (160, 60, 100, 5)]
"""About 1,700, 600 and 1,100 bytes, one token each, and one text that is too short for any window here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with one token per byte and a BOS that its tokenizer adds."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return from_pretrained(str(folder)).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@torch.no_grad()
def token_nats(model, ids):
    """Nats of ids[1:] given the tokens before them, in float64."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    return [(logits[i].logsumexp(0) - logits[i, ids[i + 1]]).item() for i in range(len(ids) - 1)]


def command(folder, data, out, *extra):
    return ["--model", str(folder), "--data", str(data), "--output-dir", str(out), *map(str, extra)]


def results(out):
    return json.loads((out / "results.json").read_text())


def curve(rows, key="perplexity"):
    return [row[key] if isinstance(row, dict) else getattr(row, key) for row in rows]


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
        assert row.tokens == row.bytes == sum(counts.values()) > 1000  # one token is one byte
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


def test_command_metric_and_function_agree(folder, data, model, tokenizer, tmp_path, capsys):
    import evaluate

    extra = ("--lengths", "64,...,256", "--stride", "32", "--max-tokens", "512", "--batch-size", "2")
    assert perplexity.main(command(folder, data, tmp_path, *extra)) == 0
    printed = capsys.readouterr().out
    rows = results(tmp_path)["rows"]
    options = {"lengths": [256, 64, 128], "stride": 32, "max_tokens": 512, "batch_size": 2}
    measured = scoring.measure(model, tokenizer, TEXTS, **options)
    metric = evaluate.load(length_perplexity.__file__, keep_in_memory=True)
    computed = metric.compute(predictions=TEXTS, model=model, tokenizer=tokenizer, **options)
    assert curve(rows) == curve(measured) == computed["perplexities"] == curve(computed["rows"])
    assert curve(rows, "stderr") == computed["stderrs"]
    assert curve(rows, "length") == computed["lengths"] == [64, 128, 256]
    assert "3 of 4 documents" in printed
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:5] == ["length", "perplexity", "byte_perplexity", "stderr", "tokens"]
    assert [float(line["perplexity"]) for line in table] == curve(rows)
    assert (tmp_path / "perplexity.png").read_bytes()[:4] == b"\x89PNG"


def test_two_processes_give_the_same_file(folder, data, tmp_path):
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "480", "--batch-size", "2")
    both = tmp_path / "both"
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "hf_linattn.eval.perplexity"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *launch, *command(folder, data, both, *extra)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("byte_ppl") == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert perplexity.main(command(folder, data, tmp_path / "one", *extra)) == 0
    finally:
        torch.set_num_threads(threads)
    assert results(both)["run"]["processes"] == 2
    keys = ("rows", "data", "arguments", "models", "versions")
    assert [results(both)[key] for key in keys] == [results(tmp_path / "one")[key] for key in keys]


def test_resume(folder, data, tmp_path, monkeypatch, capsys):
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "128")
    assert perplexity.main(command(folder, data, tmp_path / "whole", *extra)) == 0
    real = nats._forward

    def interrupted(model, ids, *args, **kwargs):
        if ids.shape[1] == 128:
            raise KeyboardInterrupt
        return real(model, ids, *args, **kwargs)

    broken = tmp_path / "broken"
    monkeypatch.setattr(nats, "_forward", interrupted)
    assert perplexity.main(command(folder, data, broken, *extra)) == 130
    assert not results(broken)["complete"]
    assert curve(results(broken)["rows"], "length") == [64]
    read = []
    monkeypatch.setattr(
        nats, "_forward", lambda m, ids, *a, **k: read.append(ids.shape[1]) or real(m, ids, *a, **k)
    )
    assert perplexity.main(command(folder, data, broken, *extra)) == 0
    assert set(read) == {128}
    assert results(broken)["rows"] == results(tmp_path / "whole")["rows"]
    assert results(broken)["complete"]
    # finished: nothing is measured again
    read.clear()
    assert perplexity.main(command(folder, data, broken, *extra)) == 0
    assert not read
    capsys.readouterr()
    assert perplexity.main(command(folder, data, broken, *extra, "--bos", "no")) == 1
    assert "other arguments (--bos)" in capsys.readouterr().err


def test_patch_and_baseline(folder, data, tokenizer, tmp_path):
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "128")
    assert perplexity.main(command(folder, data, tmp_path / "plain", *extra)) == 0
    tried = ("--patch", "elu1", "--baseline", "unpatched")
    assert perplexity.main(command(folder, data, tmp_path / "tried", *extra, *tried)) == 0
    rows = results(tmp_path / "tried")["rows"]
    assert [row["model"].split()[-1] for row in rows] == ["elu1", "elu1", "unpatched", "unpatched"]
    assert curve(rows[2:]) == curve(results(tmp_path / "plain")["rows"])
    assert curve(rows[:2]) != curve(rows[2:])
    saved = tmp_path / "saved"
    patch_model(from_pretrained(str(folder)), "elu1").save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    assert perplexity.main(command(saved, data, tmp_path / "saved-out", *extra, "--baseline", folder)) == 0
    assert curve(results(tmp_path / "saved-out")["rows"]) == curve(rows)


@pytest.mark.parametrize("scaling", ["linear:2", "dynamic:2", "yarn:4"])
def test_rope_scaling_is_that_of_transformers(folder, tokenizer, scaling):
    kind, factor = scaling.split(":")
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": float(factor)}
    config.standardize_rope_params()
    lengths = {"lengths": [64, 128], "stride": 16, "max_tokens": 64}
    scaled = load_model(Curve("x", str(folder), rope_scaling=scaling))
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


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--lengths", "64,0"), 2, "at least 1, got '0'"),
        (("--lengths", "...,64"), 2, "between two lengths"),
        (("--max-tokens", "0"), 2, "at least 1"),
        (("--rope-scaling", "ntk:2"), 2, "linear, dynamic, yarn"),
        (("--rope-scaling", "yarn:x"), 2, "number of at least 1"),
        (("--options", "{}"), 2, "belongs to --patch"),
        (("--patch", "logn", "--options", "[1]"), 2, "JSON object"),
        (("--stream", "--stride", "8"), 2, "no meaning with --stream"),
        (("--segment", "8"), 2, "no meaning without --stream"),
        (("--stream", "--baseline", "unpatched", "--patch", "elu1"), 2, "needs linear attention"),
        (("--stream", "--max-tokens", "64"), 1, "cache grows"),
        (("--patch", "elu"), 1, "Did you mean 'elu1'"),
        (("--data", "/nowhere.txt"), 1, "no such file"),
        (("--model", "/nowhere"), 1, "no such folder"),
        (("--lengths", "64,1048576"), 1, "fits is 64"),
        (("--baseline", "."), 1, "."),
    ],
)
def test_bad_commands(folder, data, tmp_path, capsys, extra, status, words):
    extra = ("--lengths", "64,128", "--stride", "32", *extra) if "--stream" not in extra else extra
    try:
        code = perplexity.main(command(folder, data, tmp_path / "out", *extra))
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == status
    assert words in message
    assert status == 2 or message.startswith("error: ")
    assert status == 2 or message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_tokenizer(folder, data, tmp_path, capsys, model):
    model.save_pretrained(tmp_path / "bare")
    assert perplexity.main(command(tmp_path / "bare", data, tmp_path / "out")) == 1
    assert "--tokenizer" in capsys.readouterr().err
    extra = ("--tokenizer", folder, "--lengths", "64", "--stride", "32", "--max-tokens", "64")
    assert perplexity.main(command(tmp_path / "bare", data, tmp_path / "out", *extra)) == 0


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        perplexity.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m hf_linattn.eval.perplexity" in shown
    assert "accelerate launch" in shown


def test_infinite_loss_is_refused(folder, tokenizer):
    model = from_pretrained(str(folder))
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(LinattnError, match="not finite at length 64"):
        scoring.measure(model, tokenizer, TEXTS, [64], stride=32, max_tokens=64)


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
