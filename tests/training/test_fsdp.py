"""Sharded parameters: training commands under `accelerate launch --use_fsdp` in two processes on the CPU."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from helpers.fixtures_finetune import (
    BASE,
    free_port,
    rows_of,
    stable_rows,
    surroundings,
    weights_of,
    workplace,
)
from helpers.fsdp_jobs import no_pictures
from helpers.launch import SHARDED, in_two_processes
from helpers.paths import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import describe, from_pretrained
from hf_linattn.convert import __main__ as convert
from hf_linattn.errors import OptionError
from hf_linattn.finetune import FinetuneArguments
from hf_linattn.finetune import __main__ as finetune
from hf_linattn.finetune.run import make_accelerator
from hf_linattn.training.fsdp import MetaCopy, accelerator_options, set_up

pytestmark = pytest.mark.usefixtures("surroundings")

STAGES = ("transfer", "distill", "finetune")
STEPS = 4
TOKENS = str(STEPS * 4 * 32)
VALIDATED = ("--eval-data", "eval.txt", "--eval-every", "2", "--eval-blocks", "3", "--checkpoint-every", "2")
COMMON = ("--model", "sharp", *BASE[2:6], "--cpu", "--no-dropout", *VALIDATED)
TUNE = (*COMMON, "--patch", "elu1", "--lr", "1e-2", "--max-steps", str(STEPS))
CONVERT = (
    *(*COMMON, "--preset", "plain"),
    *("--transfer-tokens", TOKENS, "--distill-tokens", TOKENS, "--finetune-tokens", TOKENS),
)
HYBRID = (
    *COMMON,
    *("--patch", "window+hedgehog", "--options", '{"size": 8, "mix": "learned"}', "--lora", "2"),
    *("--stages", "distill", "--distill-tokens", TOKENS, "--drop-window", "0.5"),
)
ONE, TWO = ("--batch-size", "4"), ("--batch-size", "2")
KILLED = (*CONVERT, *TWO, "--output-dir", "killed", "--resume")
JOBS = {
    "tuned": ("finetune", (*TUNE, "--batch-size", "1", "--grad-accum", "2", "--output-dir", "tuned"), None),
    "moved": ("finetune", (*TUNE, *TWO, "--output-dir", "moved"), ("moved", 4)),
    "muon": ("finetune", (*TUNE, *TWO, "--optimizer", "muon", "--output-dir", "muon"), None),
    "converted": ("convert", (*CONVERT, *TWO, "--output-dir", "converted"), None),
    **{stage: ("convert", KILLED, (f"killed/{stage}", 4)) for stage in STAGES},
    "resumed": ("convert", KILLED, None),
    "hybrid": ("convert", (*HYBRID, *TWO, "--output-dir", "hybrid"), None),
    "replicated": ("convert", (*HYBRID, *TWO, "--output-dir", "replicated"), None),
    "half": ("finetune", (*TUNE, *TWO, "--mixed-precision", "bf16", "--output-dir", "half"), None),
}


@pytest.fixture(scope="module")
def ended(workplace, warm_python):
    """How each job ended, in both processes."""
    model = AutoModelForCausalLM.from_pretrained(workplace / "model")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self_attn" in name:
                weight.mul_(20)  # or AdamW would make whole steps of gradients that are nothing but rounding
    model.save_pretrained(workplace / "sharp")
    AutoTokenizer.from_pretrained(workplace / "model").save_pretrained(workplace / "sharp")
    jobs = [
        {
            **{"command": command, "argv": argv, "port": free_port(), "kill": kill},
            "environment": {"ACCELERATE_USE_FSDP": str(name != "replicated").lower()},
        }
        for name, (command, argv, kill) in JOBS.items()
    ]
    (workplace / "jobs.json").write_text(json.dumps(jobs))
    script = ROOT / "tests" / "helpers" / "fsdp_jobs.py"
    in_two_processes(script, "jobs.json", launcher=SHARDED, cwd=workplace, python=warm_python)
    return {
        name: [json.loads((workplace / f"{number}.{process}.json").read_text()) for process in (0, 1)]
        for number, name in enumerate(JOBS)
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    no_pictures(monkeypatch.setattr)


def complete(ended, name, share=0.5):
    """The job ended well, and each process held about this share of what it trained."""
    errors = [Path(f"{list(JOBS).index(name)}.{process}.err").read_text() for process in (0, 1)]
    assert [process["exit"] for process in ended[name]] == [0, 0], errors
    parts = [process["part"] for process in ended[name]]
    assert sum(parts) == pytest.approx(2 * share)
    assert max(parts) < 1.4 * share


def single(command, *argv):
    """The same run in this process alone."""
    assert command.main([*argv, *ONE]) == 0


def distances(one, two):
    """Largest and mean difference of the weights in two folders."""
    one, two = (load_file(Path(folder) / "model.safetensors") for folder in (one, two))
    assert {name: (w.dtype, w.shape) for name, w in one.items()} == {
        name: (w.dtype, w.shape) for name, w in two.items()
    }
    apart = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    return float(apart.max()), float(apart.mean())


def test_finetuning_gives_the_result_of_one_process(ended):
    complete(ended, "tuned")
    results = json.loads(Path("tuned/results.json").read_text())
    assert (results["distributed"], results["processes"]) == ("FSDP", 2)
    single(finetune, *TUNE, "--output-dir", "tuned-alone")
    assert results["trained_parameters"] == results["parameters"]
    assert max(distances("tuned", "tuned-alone")) < 2e-5
    for row, alone in zip(rows_of("tuned"), rows_of("tuned-alone"), strict=True):
        for name in ("loss", "eval_loss", "grad_norm"):
            assert float(row[name] or 0) == pytest.approx(float(alone[name] or 0), rel=1e-5), name
    model = from_pretrained("tuned")
    assert {row.patch for row in describe(model)} == {"elu1"}
    assert Path("tuned/config.json").read_text() == Path("tuned-alone/config.json").read_text()
    assert not Path("tuned/checkpoint").exists()


def test_muon_sees_whole_matrices(ended):
    complete(ended, "muon")
    single(finetune, *TUNE, "--optimizer", "muon", "--output-dir", "muon-alone")
    # its iteration runs in bfloat16
    largest, mean = distances("muon", "muon-alone")
    assert largest < 2e-3
    assert mean < 1e-4
    assert distances("muon", "tuned")[1] > 1e-3


def test_a_killed_run_is_finished_by_one_process(ended):
    killed = ended["moved"]
    assert killed[0]["exit"] == -signal.SIGKILL
    assert killed[0]["left"] == ["moved/checkpoint/state.safetensors"]
    single(finetune, *TUNE, "--output-dir", "moved", "--resume")
    assert max(distances("moved", "tuned")) < 2e-5


def test_conversion_gives_the_result_of_one_process(ended):
    complete(ended, "converted")
    single(convert, *CONVERT, "--output-dir", "alone")
    for stage in STAGES:
        results = [json.loads(Path(f, stage, "results.json").read_text()) for f in ("converted", "alone")]
        assert results[0]["distributed"] == "FSDP"
        largest, mean = distances(f"converted/{stage}", f"alone/{stage}")
        assert largest < 1e-4, stage
        assert mean < 1e-6, stage
    transfer = [json.loads(Path(f, "transfer/results.json").read_text()) for f in ("converted", "alone")]
    assert transfer[0]["layer_losses"] == pytest.approx(transfer[1]["layer_losses"], rel=1e-4)
    validation = [json.loads(Path(f, "validation.json").read_text()) for f in ("converted", "alone")]
    assert validation[0] == pytest.approx(validation[1], rel=1e-5)
    model = from_pretrained("converted/finetune")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_killed_in_every_stage_it_ends_with_the_same_bytes(ended):
    for stage in STAGES:
        assert ended[stage][0]["exit"] == -signal.SIGKILL
        assert ended[stage][1]["exit"] != 0
        assert ended[stage][0]["left"] == [f"killed/{stage}/checkpoint/state.safetensors"]
    complete(ended, "resumed")
    for stage in STAGES:
        assert weights_of(f"killed/{stage}") == weights_of(f"converted/{stage}"), stage
        assert stable_rows(f"killed/{stage}") == stable_rows(f"converted/{stage}")


def test_lora_with_the_teacher_inside_and_a_window_dropped(ended):
    complete(ended, "hybrid")
    single(convert, *HYBRID, "--output-dir", "hybrid-alone")
    assert json.loads(Path("hybrid/distill/run.json").read_text())["teacher"] is None
    assert max(distances("hybrid/distill", "hybrid-alone/distill")) < 2e-5
    assert Path("hybrid/distill/adapter/adapter_model.safetensors").exists()
    # plain data parallelism too: no step may wait for gradients that a dropped window does not give
    complete(ended, "replicated", share=1)
    assert max(distances("replicated/distill", "hybrid/distill")) < 2e-5


def test_bfloat16(ended):
    complete(ended, "half")
    losses = [json.loads(Path(f, "results.json").read_text())["eval_loss"] for f in ("half", "tuned")]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert 0 < distances("half", "tuned")[1] < 2e-3


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FSDP_VERSION", "1", "--fsdp_version 2"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "activation checkpointing is not supported"),
        ("FSDP_AUTO_WRAP_POLICY", "BY_CHANCE", "Invalid auto wrap policy: BY_CHANCE"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "--use_deepspeed is not supported by this command: split"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "--use_megatron_lm is not supported"),
    ],
)
def test_refused_settings(workplace, monkeypatch, capsys, variable, value, message):
    for name, setting in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", variable: value}.items():
        monkeypatch.setenv(name, setting)
    argv = [*BASE, "--max-steps", "1", "--output-dir", "refused"]
    assert finetune.main(argv) == 1
    error = capsys.readouterr().err.strip().split("\n")
    assert len(error) == 1
    assert message in error[0]
    assert not Path("refused").exists()


def test_float16_is_refused():
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, num_processes=2)
    accelerator = SimpleNamespace(state=state, is_fsdp2=True, mixed_precision="fp16")
    with pytest.raises(OptionError, match="use bf16 or no"):
        set_up(accelerator, {"fsdp_plugin": object()})


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="2 processes were started"):
        make_accelerator(FinetuneArguments("model", "text.txt", "out"))


def test_without_fsdp_nothing_is_asked_of_accelerate(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    assert accelerator_options() == {}


def test_a_copy_on_the_meta_device_is_filled_with_tied_weights_and_buffers():
    model = AutoModelForCausalLM.from_pretrained("model")
    model.register_buffer("seen", torch.zeros(2))
    copy, absent = MetaCopy(model, True), MetaCopy(model, False)
    assert {parameter.device.type for parameter in copy.model.parameters()} == {"meta"}
    with torch.no_grad():
        model.seen += 1
        model.lm_head.weight[0] = 7
    filled = copy.fill(model)
    assert absent.fill(model) is None
    assert filled is not model
    assert filled.lm_head.weight is filled.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(filled.state_dict()[name], tensor), name
