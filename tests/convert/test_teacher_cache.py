"""A teacher's top predictions on the disk: their divergence, and conversions that need no teacher."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import shutil
from collections import namedtuple
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from helpers import tiny_models
from helpers.chat import PLAIN
from helpers.fixtures_convert import BASE
from helpers.fixtures_finetune import rows_of, surroundings, weights_of, workplace
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn.convert import run as conversion
from hf_linattn.convert import stages, teacher_cache
from hf_linattn.convert.__main__ import main
from hf_linattn.convert.distillation import DistillationLoss
from hf_linattn.training import head
from hf_linattn.training.divergence import TopPredictions, top_divergence, top_predictions
from hf_linattn.training.head import logits_in_chunks, predict
from hf_linattn.training.loop import next_token_losses

IDS = tiny_models.tokens(3, 24)
DISTILL = ("--model", "sharp", *BASE[2:], "--stages", "distill", "--distill-tokens", "512")


@pytest.fixture(autouse=True)
def sharp(surroundings):
    """A folder with a model whose predictions are far from uniform."""
    if not Path("sharp").exists():
        model = AutoModelForCausalLM.from_pretrained("model")
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(10 if weight.ndim > 1 else 1)
        model.save_pretrained("sharp")
        AutoTokenizer.from_pretrained("model").save_pretrained("sharp")


def reference(student, teacher, count):
    """The divergence over the top tokens and the rest, in float64, token by token."""
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    losses = []
    for of_teacher, of_student in zip(p.flatten(0, -2), q.flatten(0, -2), strict=True):
        kept = torch.zeros(len(of_teacher), dtype=torch.bool)
        kept[of_teacher.argsort(descending=True)[:count]] = True
        a, b = (torch.cat([x[kept], x[~kept].sum()[None]]) for x in (of_teacher, of_student))
        losses.append((a * (a / b).log()).sum())
    return torch.stack(losses).view(p.shape[:-1])


@pytest.mark.parametrize("chunk", [2**24, 970])
@pytest.mark.parametrize("count", [1, 8, 96])
def test_the_divergence_is_that_of_its_formula(chunk, count, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", chunk)
    student, teacher = tiny_models.llama(2), tiny_models.llama(2, seed=2)
    with torch.no_grad():
        parts = [top_predictions(logits, count) for logits in logits_in_chunks(predict(teacher, IDS))]
    assert len(parts) == (1 if chunk > 970 else 8)
    ids, log_probs = (torch.cat(part).view(3, 24, -1) for part in zip(*map(astuple, parts), strict=True))
    weight = 0.5 if count == 8 else 0.0
    losses = DistillationLoss(lambda ids_: TopPredictions(ids, log_probs), ce_weight=weight)(student, IDS)
    want = reference(student(IDS).logits, teacher(IDS).logits, count).mean(1)
    want = want + weight * next_token_losses(student, IDS)
    assert tiny_models.distance(losses, want) < 1e-6
    parameters = list(student.parameters())
    gradients = (torch.autograd.grad(loss.sum(), parameters) for loss in (losses, want))
    for got, wanted in zip(*gradients, strict=True):
        assert tiny_models.distance(got, wanted) < 1e-5
    if count == 96:  # all but one token
        p, q = (model(IDS).logits.log_softmax(-1) for model in (teacher, student))
        assert tiny_models.distance(losses, (p.exp() * (p - q)).sum(-1).mean(1)) < 1e-6


def test_a_certain_teacher_and_a_hopeless_student_stay_finite():
    logits = torch.zeros(1, 97)
    logits[0, 3] = 200.0
    top = top_predictions(logits, 4)
    student = torch.zeros(1, 97)
    student[0, 5] = 200.0
    student.requires_grad_()
    loss = top_divergence(student, top.ids, top.log_probs)
    loss.backward()
    assert abs(loss.item() - 200) < 1e-3
    assert student.grad.isfinite().all()


@pytest.fixture
def loaded(monkeypatch):
    """Names of what was loaded as an original beside the student: by the cache, and by stage distill."""
    names = []
    fill, teach = conversion.fill_cache, stages.frozen_teacher

    def filling(folder, key, rows, load, *rest):
        return fill(folder, key, rows, lambda: (names.append("cache"), load())[1], *rest)

    monkeypatch.setattr(conversion, "fill_cache", filling)
    monkeypatch.setattr(stages, "frozen_teacher", lambda *args: (names.append("stage"), teach(*args))[1])
    monkeypatch.setattr(stages, "teacher_inside", lambda *args: names.append("inside"))
    return names


def losses_of(folder):
    return [(row["loss"], row["eval_loss"]) for row in rows_of(f"{folder}/distill")]


def test_a_second_conversion_needs_no_teacher(loaded):
    assert main([*DISTILL, "--output-dir", "full"]) == 0
    assert loaded == ["stage"]
    argv = [*DISTILL, "--cache-teacher", "cache"]
    assert main([*argv, "--output-dir", "first"]) == 0
    assert main([*argv, "--output-dir", "second"]) == 0
    assert loaded == ["stage", "cache"]
    assert weights_of("first/distill") == weights_of("second/distill")
    fewer = ["--seed", "1", "--patch", "elu1", "--lora", "4", "--distill-tokens", "128"]
    assert main([*argv, *fewer, "--data", "train.txt", "--seed", "0", "--output-dir", "third"]) == 0
    assert loaded == ["stage", "cache"]
    record = json.loads(Path("cache/teacher.json").read_text())
    tokens = record["rows"] * 32
    assert Path("cache/predictions.bin").stat().st_size == tokens * (64 * 2 + 65 * 2)
    for (of_all, held), (of_top, held_top) in zip(losses_of("full"), losses_of("first"), strict=True):
        assert not of_all or 0 < float(of_top) < float(of_all)
        assert not held or 0 < float(held_top) < float(held)


def test_all_but_one_token_train_like_all(monkeypatch):
    monkeypatch.setattr(teacher_cache, "TOP", 1000)
    assert main([*DISTILL, "--output-dir", "whole"]) == 0
    assert main([*DISTILL, "--cache-teacher", "most", "--output-dir", "most-of-it"]) == 0
    assert json.loads(Path("most/teacher.json").read_text())["top"] == 256
    pairs = zip(losses_of("whole"), losses_of("most-of-it"), strict=True)
    for want, got in ((float(a), float(b)) for pair in pairs for a, b in zip(*pair, strict=True) if a):
        assert abs(got - want) < 2e-3 * want  # float16


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_cache_goes_on_to_the_same_bytes(failure, loaded, monkeypatch, capsys):
    shutil.rmtree("cut", ignore_errors=True)
    shutil.rmtree("stopped", ignore_errors=True)
    argv = [*DISTILL, "--cache-teacher", "cut", "--output-dir", "stopped"]
    mark, marked = teacher_cache._mark, []

    def stop(file, marks, number):
        if len(marked) == 2:
            file.write(b"half")
            raise failure
        marked.append(number)
        mark(file, marks, number)

    with monkeypatch.context() as context:
        context.setattr(teacher_cache, "_mark", stop)
        assert main(argv) == (130 if failure is KeyboardInterrupt else 1)
    if failure is not KeyboardInterrupt:
        assert "error: cannot write cut: No space left on device" in capsys.readouterr().err
    assert not Path("stopped/plan.json").exists()
    assert main([*DISTILL, "--batch-size", "2", "--cache-teacher", "cut", "--output-dir", "other"]) == 0
    shutil.rmtree("other")
    assert main([*DISTILL, "--cache-teacher", "straight", "--output-dir", "other"]) == 0
    shutil.rmtree("other")
    for name in ("rows.bin", "predictions.bin", "done.bin", "teacher.json"):
        assert Path("cut", name).read_bytes() == Path("straight", name).read_bytes()
    shutil.rmtree("straight")


@pytest.fixture
def cache(sharp):
    """A complete cache, and copies of model, tokenizer and text that differ."""
    if not Path("made/teacher.json").exists():
        assert main([*DISTILL, "--cache-teacher", "made", "--output-dir", "maker"]) == 0
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained("sharp"),
            AutoTokenizer.from_pretrained("sharp"),
        )
        tokenizer.save_pretrained("moved")
        with torch.no_grad():
            model.model.norm.weight.mul_(1.1)
        model.save_pretrained("moved")
        words = json.loads(Path("moved/tokenizer.json").read_text())
        vocabulary = words["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        Path("swapped").mkdir()
        Path("swapped/tokenizer.json").write_text(json.dumps(words))
        shutil.copy("moved/tokenizer_config.json", "swapped")
        Path("other.txt").write_text("another text, of which no row was seen before. " * 60)
        shutil.copytree("made", "damaged")
        Path("damaged/predictions.bin").write_bytes(b"short")
    return "made"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "moved"], "made was made with another teacher: give --cache-teacher another folder"),
        (["--tokenizer", "swapped"], "made was made with another tokenizer:"),
        (["--block-size", "16"], "made was made with another block size:"),
        (
            ["--data", "other.txt"],
            "rows that this run takes: it was made with another text, --eval-data, --seed",
        ),
        (["--cache-teacher", "damaged"], "--cache-teacher damaged is damaged"),
        (["--cache-teacher", "train.txt"], "cannot write train.txt: a file of this name"),
        (["--stages", "transfer"], "--cache-teacher: there is no stage distill; leave it out"),
        (["--objective", "states"], "--cache-teacher: hidden states are compared, not predictions"),
    ],
)
def test_a_cache_of_something_else_is_refused(argv, message, cache, capsys):
    before = {path: path.read_bytes() for path in Path(cache).iterdir()}
    assert main([*DISTILL, "--cache-teacher", cache, "--output-dir", "refused", *argv]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not Path("refused/plan.json").exists()
    assert {path: path.read_bytes() for path in Path(cache).iterdir()} == before


def test_no_room_on_the_disk(monkeypatch, capsys):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    assert main([*DISTILL, "--cache-teacher", "full-disk", "--output-dir", "unborn"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: --cache-teacher full-disk needs 0.2 MB (640 tokens x 258 bytes)")
    assert not list(Path("full-disk").iterdir())
    assert not Path("unborn/plan.json").exists()


def test_streamed_rows_are_the_same_rows(loaded):
    argv = [*DISTILL, "--streaming", "--cache-teacher", "streamed"]
    assert main([*argv, "--output-dir", "streamed-first"]) == 0
    assert main([*argv, "--output-dir", "streamed-second"]) == 0
    assert loaded == ["cache"]
    assert weights_of("streamed-first/distill") == weights_of("streamed-second/distill")


def test_chat_compares_the_assistants_tokens_alone(loaded):
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = PLAIN
    shutil.copytree("sharp", "chatty")
    tokenizer.save_pretrained("chatty")
    says = ({"role": "user", "content": "who are you?"}, {"role": "assistant", "content": "the cat sat"})
    Path("chat.jsonl").write_text((json.dumps({"messages": says}) + "\n") * 40)
    argv = [*DISTILL, "--model", "chatty", "--data", "chat.jsonl", "--eval-data", "chat.jsonl"]
    assert main([*argv, "--output-dir", "chat-full"]) == 0
    assert main([*argv, "--cache-teacher", "chat-cache", "--output-dir", "chat-top"]) == 0
    assert loaded == ["stage", "cache"]
    (want, _), (got, _) = losses_of("chat-full")[1], losses_of("chat-top")[1]
    assert 0.3 * float(want) < float(got) < float(want)
