"""The conversion command: stages, resuming, processes, bad input."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import math
import os
import re
import subprocess
from pathlib import Path

import datasets
import pytest
import torch
from helpers.fixtures_convert import BASE, STAGES, TOKENS
from helpers.fixtures_finetune import (
    kill_at_step,
    rows_of,
    stable_rows,
    start_slowly,
    surroundings,
    weights_of,
    workplace,
)
from helpers.launch import TORCHRUN, in_two_processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import describe, from_pretrained
from hf_linattn.convert import convert
from hf_linattn.convert.__main__ import main
from hf_linattn.convert.run import Validation
from hf_linattn.finetune.recipe import TrainingRecipe
from hf_linattn.training.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("surroundings")

THREE = (
    *BASE,
    *("--transfer-tokens", str(TOKENS), "--distill-tokens", str(TOKENS), "--finetune-tokens", str(TOKENS)),
)


def read(path):
    return json.loads(Path(path).read_text())


@pytest.fixture(scope="module")
def converted(workplace, warm_python):
    """Folder of an uninterrupted conversion to hedgehog in three stages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [warm_python, "-m", "hf_linattn.convert", *THREE, "--output-dir", "converted"]
    done = subprocess.run(
        command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (workplace / "converted.out").write_text(done.stdout)
    return workplace / "converted"


@pytest.fixture
def sharp(workplace):
    """A folder with a model whose attention is not nearly uniform, and which shows in its predictions."""
    model = AutoModelForCausalLM.from_pretrained("model")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self_attn" in name:
                weight.mul_(20)
    model.save_pretrained("sharp")
    AutoTokenizer.from_pretrained("model").save_pretrained("sharp")
    return ["--model", "sharp", *BASE[2:]]


def test_every_stage_leaves_a_model_and_its_figures(converted):
    plan, validation = read(converted / "plan.json"), read(converted / "validation.json")
    assert plan["stages"] == list(STAGES)
    assert not plan["hybrid"]
    assert plan["lora"] == 0
    assert list(validation) == ["original", "swapped", *STAGES]
    before = from_pretrained(converted / "transfer")
    for stage in STAGES:
        model = from_pretrained(converted / stage)
        assert {row.patch for row in describe(model)} == {"hedgehog"}
        results = read(converted / stage / "results.json")
        assert results["steps"] == 6
        assert results["tokens"] == TOKENS
        assert len(rows_of(converted / stage)) == 7
        assert not (converted / stage / "checkpoint").exists()
    original = AutoModelForCausalLM.from_pretrained("model")
    for name, weight in before.named_parameters():
        if ".linattn." not in name:
            assert torch.equal(weight, original.get_parameter(name)), name
    results = read(converted / "transfer/results.json")
    assert results["eval_loss"] < results["eval_loss_before"]
    assert results["trained_parameters"] == results["patch_parameters"]
    assert len(results["layer_losses"]) == 2
    assert read(converted / "distill/results.json")["eval_loss"] < validation["swapped"]
    page = (converted / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "patched, untrained" in page
    out = (converted.parent / "converted.out").read_text()
    assert f"{math.exp(validation['finetune']):.4g}" in out


def test_the_first_validation_of_distillation_is_the_divergence_of_what_transfer_left(converted):
    tokenizer = AutoTokenizer.from_pretrained("model")
    ids = torch.tensor(tokenizer(Path("eval.txt").read_text(), add_special_tokens=False)["input_ids"])
    rows = torch.cat([torch.tensor([256]), ids])[: 4 * 32].view(4, 32)
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained("model").eval()(rows).logits.log_softmax(-1)
        given = from_pretrained(converted / "transfer")(rows).logits.log_softmax(-1)
    want = (original.exp() * (original - given)).sum(-1).mean()
    assert abs(read(converted / "distill/results.json")["eval_loss_before"] - want.item()) < 1e-5


@pytest.mark.usefixtures("warm_start")
def test_killed_in_every_stage_it_ends_with_the_same_bytes(converted):
    argv = (*THREE, "--checkpoint-every", "2", "--output-dir", "killed", "--resume")
    for stage, step in zip(STAGES, (1, 3, 5), strict=True):
        kill_at_step(start_slowly("convert", *argv), f"killed/{stage}", step)
    assert main([*argv]) == 0
    for stage in STAGES:
        assert weights_of(f"killed/{stage}") == weights_of(converted / stage), stage
        assert stable_rows(f"killed/{stage}") == stable_rows(converted / stage)
    assert read("killed/validation.json") == read(converted / "validation.json")


# tests/training/test_fsdp.py converts in two processes in every run
@pytest.mark.full
@pytest.mark.usefixtures("warm_start")
def test_two_processes_give_the_result_of_one(converted):
    in_two_processes(
        *("-m", "hf_linattn.convert", *THREE, "--batch-size", "2", "--output-dir", "both"),
        launcher=TORCHRUN,
    )
    for stage in STAGES:
        one = load_file(converted / stage / "model.safetensors")
        both = load_file(f"both/{stage}/model.safetensors")
        # AdamW makes whole steps of gradients that are nothing but rounding, so single numbers may differ
        apart = [(one[name] - both[name]).abs().flatten() for name in one]
        assert float(torch.cat(apart).mean()) < 1e-5, stage
        assert max(float(tensor.median()) for tensor in apart) < 1e-5, stage
    for name, loss in read(converted / "validation.json").items():
        assert abs(read("both/validation.json")[name] - loss) < 1e-4, name


def test_the_last_validation_of_stage_finetune_is_that_of_the_model_on_disk(converted, monkeypatch):
    path = converted / "validation.json"
    text = path.read_text()
    losses = json.loads(text)
    assert losses.pop("finetune") == read(converted / "finetune/results.json")["eval_loss"]
    path.write_text(json.dumps(losses))
    monkeypatch.setattr(Validation, "_was_measured_by_the_loop", lambda self, stage, results: False)
    assert main([*THREE, "--output-dir", "converted", "--resume"]) == 0
    assert path.read_text() == text


def test_a_finished_conversion_is_not_done_again(converted, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_train_step", None)
    assert main([*THREE, "--output-dir", "converted", "--resume"]) == 0


def test_a_hybrid_trains_lora_with_the_teacher_inside(sharp):
    argv = [*sharp, "--distill-tokens", str(TOKENS), "--transfer-tokens", str(TOKENS), "--drop-window", "0.5"]
    hybrid = ["--patch", "window+hedgehog", "--options", '{"size": 8, "mix": "learned"}', "--lora", "2"]
    assert main([*argv, *hybrid, "--output-dir", "hybrid"]) == 0
    assert read("hybrid/plan.json")["hybrid"]
    assert read("hybrid/distill/run.json")["teacher"] is None
    results = read("hybrid/distill/results.json")
    assert results["eval_loss"] < results["eval_loss_before"]
    transfer = load_file("hybrid/transfer/model.safetensors")
    gates = [name for name in transfer if name.endswith("window.gate")]
    assert len(gates) == 2
    assert all(bool((transfer[name] == 3.0).all()) for name in gates)  # the window had no part
    model = from_pretrained("hybrid/distill")
    assert {row.patch for row in describe(model)} == {"window+hedgehog"}
    assert Path("hybrid/distill/adapter/adapter_model.safetensors").exists()


@pytest.mark.parametrize("patch", ['{"0": "elu1"}', "window", "h2o"])
def test_lora_is_the_default_where_softmax_stays(patch, tmp_path):
    argv = [*BASE, "--stages", "distill", "--distill-tokens", "128", "--patch", patch]
    folder = tmp_path / "converted"
    assert main([*argv, "--output-dir", str(folder)]) == 0
    assert read(folder / "plan.json")["lora"] == 16
    assert sorted(path.name for path in folder.iterdir()) == [
        "distill", "plan.json", "report.html", "validation.json",
    ]  # fmt: skip


def test_the_patch_learns_at_a_rate_of_its_own():
    rates = [
        TrainingRecipe(10.0).rate(f"layers.0.self_attn.{name}") for name in ("linattn.a", "q_proj.weight")
    ]
    assert rates == [10, 1]
    argv = [*BASE, "--stages", "transfer,distill", "--transfer-tokens", str(TOKENS)]
    argv += ["--distill-tokens", str(TOKENS), "--patch-rate", "0", "--output-dir", "still"]
    assert main(argv) == 0
    before, after = (dict(from_pretrained(f"still/{stage}").named_parameters()) for stage in STAGES[:2])
    same = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert same == {name for name in before if ".linattn." in name}


def test_a_map_without_parameters_takes_a_layer_in_front():
    argv = [*BASE, "--patch", "elu1", "--learn-front", "--stages", "transfer", "--target", "weights"]
    assert main([*argv, "--transfer-tokens", str(TOKENS), "--output-dir", "front"]) == 0
    model = from_pretrained("front/transfer")
    assert [row.options for row in describe(model)] == [
        {"linear": {"feature_map": "elu1", "front": True}}
    ] * 2
    results = read("front/transfer/results.json")
    assert results["eval_loss"] < results["eval_loss_before"]


def test_a_state_that_forgets_is_calibrated_before_it_learns():
    losses = {}
    for tokens in ("0", "128"):
        argv = [*BASE, "--patch", "delta", "--stages", "transfer", "--transfer-tokens", str(TOKENS)]
        assert main([*argv, "--calibrate-tokens", tokens, "--output-dir", f"delta-{tokens}"]) == 0
        results = read(f"delta-{tokens}/transfer/results.json")
        assert len(results.get("calibration", {})) == (2 if tokens == "128" else 0)
        losses[tokens] = results["eval_loss_before"]
    assert losses["128"] < losses["0"]


def test_too_little_text_to_calibrate_on(capsys):
    argv = [*BASE, "--patch", "delta", "--stages", "transfer", "--transfer-tokens", str(TOKENS)]
    assert main([*argv, "--calibrate-tokens", "10000000", "--output-dir", "little"]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert re.search(r"--calibrate-tokens 10000000, and the text has \d+: give ", line)


def test_projections_are_trained_in_copies_and_the_teacher_is_apart(sharp):
    argv = [*sharp, "--patch", "elu1", "--train-projections", "--lora", "2"]
    tokens = ["--transfer-tokens", str(TOKENS), "--distill-tokens", "128"]
    assert main([*argv, *tokens, "--output-dir", "copies"]) == 0
    assert read("copies/distill/run.json")["teacher"] == "sharp"
    results = read("copies/transfer/results.json")
    assert results["eval_loss"] < results["eval_loss_before"]
    assert results["patch_parameters"] == 0


def test_a_stage_goes_on_from_a_folder_of_another_conversion(converted):
    argv = ["--model", "converted/transfer", "--teacher", "model", *BASE[2:], "--stages", "distill"]
    assert main([*argv, "--distill-tokens", str(TOKENS), "--output-dir", "second"]) == 0
    assert weights_of("second/distill") == weights_of(converted / "distill")


def test_from_python_with_objects(converted):
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    told = {"preset": "plain", "block_size": 32, "batch_size": 4}
    told |= {"eval_data": "eval.txt", "eval_every": 3, "eval_blocks": 4, "no_dropout": True, "cpu": True}
    told |= {f"{stage}_tokens": TOKENS for stage in STAGES}
    texts = [Path("train.txt").read_text()]
    result = convert(model, texts, tokenizer=tokenizer, output_dir="api", **told)
    assert not result.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    want = load_file(converted / "finetune/model.safetensors")
    assert all(
        torch.equal(want[name], weight) for name, weight in result.state_dict().items() if name in want
    )
    table = datasets.Dataset.from_dict({"body": texts})
    again = convert(
        "model", table, output_dir="api2", text_column="body", tokenizer=tokenizer, **told,
    )  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), result.parameters(), strict=True))


def test_its_own_text_resumes_and_depends_on_the_seed_alone(monkeypatch):
    argv = [*BASE[:2], "--data", "self", *BASE[4:], "--eval-data", "self", "--stages", "distill"]
    argv = [*argv, "--distill-tokens", str(40 * 32), "--batch-size", "8"]
    assert main([*argv, "--output-dir", "own"]) == 0
    lines = Path("own/self.jsonl").read_text().splitlines()
    assert len(lines) == 48
    assert len({json.loads(line)["text"] for line in lines}) == 48
    assert Path("own/self-eval.jsonl").read_text() != Path("own/self.jsonl").read_text()
    assert set(read("own/validation.json")) == {"original", "swapped", "distill"}
    Path("again").mkdir()
    cut = "\n".join(lines[:16]) + "\n" + lines[16][:9]  # as a kill leaves it
    Path("again/self.jsonl").write_text(cut)
    assert main([*argv, "--output-dir", "again"]) == 0
    assert Path("again/self.jsonl").read_text() == Path("own/self.jsonl").read_text()
    assert weights_of("again/distill") == weights_of("own/distill")
    assert main([*argv, "--seed", "1", "--output-dir", "other"]) == 0
    assert Path("other/self.jsonl").read_text() != Path("own/self.jsonl").read_text()


def test_early_stop(monkeypatch):
    argv = [*BASE, "--stages", "transfer", "--patience", "2", "--eval-every", "1", "--transfer-lr", "0"]
    assert main([*argv, "--transfer-tokens", str(20 * 128), "--output-dir", "patient"]) == 0
    assert read("patient/transfer/results.json")["steps"] == 2


def test_overwrite_begins_anew():
    argv = [*BASE, "--patch", "t2r", "--stages", "transfer", "--transfer-tokens", "128"]
    argv = [*argv, "--output-dir", "replaced"]
    for name in ("distill", "transfer"):
        Path("replaced", name).mkdir(parents=True)
    Path("replaced/plan.json").write_text("{}")
    Path("replaced/notes.txt").touch()
    assert main([*argv, "--overwrite"]) == 0
    assert sorted(path.name for path in Path("replaced").iterdir()) == [
        "notes.txt", "plan.json", "report.html", "transfer", "validation.json",
    ]  # fmt: skip
    assert read("replaced/plan.json")["arguments"]["patch"] == "t2r"


def test_options_that_an_older_version_did_not_know_are_at_their_defaults(converted, capsys):
    path = converted / "plan.json"
    plan, text = read(path), path.read_text()
    for name in ("objective", "patch_rate"):
        del plan["arguments"][name]
    path.write_text(json.dumps(plan))
    assert main([*THREE, "--output-dir", "converted", "--resume"]) == 0
    assert main([*THREE, "--patch-rate", "2", "--output-dir", "converted", "--resume"]) == 1
    assert "it began with other patch_rate (1.0 then, 2.0 now)" in capsys.readouterr().err
    path.write_text(text)


def test_another_plan_is_not_resumed(converted, capsys):
    assert main([*THREE, "--patch", "t2r", "--output-dir", "converted", "--resume"]) == 1
    assert "it began with other patch ('hedgehog' then, 't2r' now)" in capsys.readouterr().err
    assert main([*THREE, "--output-dir", "converted"]) == 1
    assert "--resume, --overwrite or another directory" in capsys.readouterr().err


def test_a_new_patch_for_a_patched_model_is_refused(converted, capsys):
    argv = ["--model", "converted/transfer", *BASE[2:], "--patch", "elu1", "--output-dir", "twice"]
    assert main(argv) == 1
    assert "is patched already" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    step = TrainingLoop._train_step

    def interrupted(self):
        if self.step == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(TrainingLoop, "_train_step", interrupted)
    argv = [*BASE, "--transfer-tokens", str(TOKENS), "--stages", "transfer", "--output-dir", "stopped"]
    assert main(argv) == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.setattr(TrainingLoop, "_train_step", step)
    assert main([*argv, "--resume"]) == 0
