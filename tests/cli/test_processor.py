"""Which dtypes the processor multiplies, and the line where it does not."""

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers.tiny_models import llama

from hf_linattn.cli import processor
from hf_linattn.eval.common.models import ModelSpec, load_model
from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.finetune.run import make_accelerator

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["avx512", "avx2"])
def has_bf16(request, monkeypatch):
    """An x86 processor with products of bfloat16, and one without."""
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: request.param)
    processor.note_slow.cache_clear()
    yield request.param
    processor.note_slow.cache_clear()


def test_a_processor_without_products_of_bfloat16_says_so_once(has_bf16, capsys):
    for _ in range(2):
        processor.note_slow(CPU, torch.bfloat16, "--dtype float32")
    processor.note_slow(CPU, torch.float32, "--dtype float32")
    said = capsys.readouterr().err
    assert said.count("no fast products of bfloat16; --dtype float32") == (0 if has_bf16 else 1)
    assert said.count("\n") == (0 if has_bf16 else 1)


def test_other_processors_and_gpus_are_not_judged(monkeypatch):
    assert not processor.is_slow(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(processor.platform, "machine", lambda: "arm64")
    assert not processor.is_slow(CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"mixed_precision": "bf16"}, "--mixed-precision no"),
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({}, ""),
    ],
)
def test_training_says_it_before_the_first_step(has_bf16, options, instead, tmp_path, capsys):
    AcceleratorState._reset_state(reset_partial_state=True)
    make_accelerator(FinetuneArguments("model", "text.txt", str(tmp_path), cpu=True, **options))
    assert (f"{instead} reads and trains" in capsys.readouterr().err) is (bool(instead) and not has_bf16)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_commands_of_measurement_say_it_where_a_model_was_saved_so(has_bf16, tmp_path, capsys):
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    load_model(ModelSpec("tiny", str(tmp_path)))
    assert ("--dtype float32" in capsys.readouterr().err) is not has_bf16
