"""Copies of a patched model, made in every way that people make them, for each kind of patch."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import tiny_models
from helpers.kinds import KINDS, patched_model, plain_model
from helpers.learned_patches import logits, state
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, Trainer, TrainingArguments

from hf_linattn import describe, from_pretrained, unpatch_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
IDS = tiny_models.tokens(2, 40)
every_kind = pytest.mark.parametrize("kind", KINDS)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_whole], ids=lambda way: way.__name__)
@every_kind
def test_a_copy_is_whole_and_comes_off_alone(kind, duplicate):
    model = patched_model(kind)
    want, before = logits(model, IDS), state(model)
    twin = duplicate(model)
    assert torch.equal(logits(twin, IDS), want)
    if kind != "encoder":
        prompt = {"inputs": IDS[:1, :20], "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(twin.generate(**prompt), model.generate(**prompt))
    plain = logits(plain_model(kind), IDS)
    assert torch.equal(logits(unpatch_model(twin), IDS), plain)
    assert state(model) == before
    assert torch.equal(logits(model, IDS), want)


ELSEWHERE = """
import sys, torch
loaded = torch.load(sys.argv[1], weights_only=False)
from hf_linattn import unpatch_model
ids = torch.load(sys.argv[2])
with torch.no_grad():
    found = {kind: model(ids, use_cache=False)[0] for kind, model in loaded.items()}
    plain = {kind: unpatch_model(model)(ids, use_cache=False)[0] for kind, model in loaded.items()}
torch.save((found, plain), sys.argv[3])
"""


@pytest.mark.usefixtures("warm_start")
def test_another_process_reads_a_whole_model(tmp_path):
    models = {kind: patched_model(kind) for kind in KINDS}
    files = [tmp_path / name for name in ("models", "ids", "logits")]
    torch.save(models, files[0])
    torch.save(IDS, files[1])
    subprocess.run([sys.executable, "-c", ELSEWHERE, *files], capture_output=True, check=True)
    found, plain = torch.load(files[2])
    for kind, model in models.items():
        assert torch.equal(found[kind], logits(model, IDS))
        assert torch.equal(plain[kind], logits(plain_model(kind), IDS))


@every_kind
def test_shards_device_maps_and_dtypes(kind, tmp_path):
    model = patched_model(kind)
    want = logits(model, IDS)
    model.save_pretrained(tmp_path / "saved", max_shard_size="10KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    auto = AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM
    for given in ({}, {"device_map": "cpu"}, {"device_map": "auto", "low_cpu_mem_usage": True}):
        for loaded in (
            auto.from_pretrained(tmp_path / "saved", **given),
            from_pretrained(tmp_path / "saved", **given),
        ):
            assert torch.equal(logits(loaded, IDS), want)
            assert str(describe(loaded)) == str(describe(model))
    half = auto.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    moved = auto.from_pretrained(tmp_path / "saved").to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), moved.parameters(), strict=True))
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "saved", dtype="auto"), IDS), want)
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert tiny_models.distance(logits(model, IDS), want) < 0.1 * float(want.abs().max())
    assert (
        tiny_models.distance(logits(unpatch_model(model).float(), IDS), logits(plain_model(kind), IDS)) < 0.1
    )


@every_kind
def test_the_trainer_learns_and_its_checkpoint_loads(kind, tmp_path):
    model = patched_model(kind).train()
    rows = [{"input_ids": row, "labels": row} for row in tiny_models.tokens(16, 24, seed=3)]
    options = {"max_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1}
    options |= {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    trainer = Trainer(model, TrainingArguments(str(tmp_path), save_steps=5, **options), train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    loaded = from_pretrained(tmp_path / "checkpoint-5")
    assert torch.equal(logits(loaded, IDS), logits(model.eval(), IDS))
