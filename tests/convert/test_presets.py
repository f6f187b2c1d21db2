"""Presets: what each fills in, what a user gives wins, and the layers that `recall` keeps."""
# ruff: noqa: F401  fixtures are imported, and then named as arguments

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.fixtures_convert import BASE
from helpers.fixtures_finetune import surroundings, weights_of, workplace
from helpers.launch import TORCHRUN, in_two_processes
from transformers import AutoConfig, BloomConfig, Gemma3Config, GPT2Config, LlamaConfig

from hf_linattn import describe, from_pretrained
from hf_linattn.convert import ConvertArguments, keep_layers
from hf_linattn.convert.__main__ import main
from hf_linattn.convert.arguments import build_parser, learning_rate_for
from hf_linattn.convert.presets import FORMER, PRESETS
from hf_linattn.convert.resolve import resolve, resolve_patch
from hf_linattn.convert.stages import stage_arguments
from hf_linattn.errors import OptionError
from hf_linattn.registry import parse

pytestmark = pytest.mark.usefixtures("surroundings")

SMALL = tuple(word for word in BASE if word not in ("--preset", "plain"))
RECIPE = ("batch_size", "adam_beta2", "patch_rate", "ce_weight", "eval_every", "drop_window")


def told(**given):
    return ConvertArguments("model", "train.txt", "out", **given)


def test_the_bare_command_is_the_best_recipe():
    argv = ["--model", "model", "--data", "train.txt", "--output-dir", "out"]
    arguments = ConvertArguments(**vars(build_parser().parse_args(argv)))
    assert arguments == told()
    assert [getattr(arguments, name) for name in RECIPE] == [2, 0.999, 10, 1, 200, 0.1]
    assert [arguments.stage_tokens(name) for name in arguments.chosen_stages()] == [100_000, 900_000]
    plan = resolve(arguments).arguments
    assert plan.patch == "window+gated"
    assert parse(plan.patch, plan.options).options == {
        "window": {"size": 64, "sinks": 4},
        "gated": {"feature_map": "hedgehog", "shortest": 64, "half_life": 1024},
    }
    assert resolve(told(preset="recall")).arguments.options == plan.options
    assert resolve(told(preset="linear")).arguments.options == {"gated": dict(PRESETS["linear"].options)}
    plain = resolve(told(preset="plain"))
    assert [stage.tokens for stage in plain.stages] == [200_000, 800_000]
    assert (plain.arguments.patch, plain.arguments.options) == ("hedgehog", None)
    assert [getattr(plain.arguments, name) for name in RECIPE] == [8, 0.95, 1, 0, 50, 0]


def test_what_is_given_wins():
    given = {"batch_size": 8, "adam_beta2": 0.95, "patch_rate": 1.0, "ce_weight": 0.0, "eval_every": 50}
    assert {name: getattr(told(**given), name) for name in given} == given
    arguments = resolve(told(options={"size": 32})).arguments
    assert arguments.options["window"] == {"size": 32, "sinks": 4}
    arguments = resolve(told(options={"gated": {"shortest": 2}}, tokens=50_000, distill_tokens=7)).arguments
    assert arguments.options["gated"] == {"feature_map": "hedgehog", "shortest": 2, "half_life": 1024}
    assert [arguments.stage_tokens(name) for name in ("transfer", "distill")] == [5000, 7]
    arguments = resolve(told(patch="window+elu1", learn_front=True, options={"size": 8})).arguments
    assert arguments.patch == "window+linear"
    assert arguments.options == {"window": {"size": 8}, "linear": {"feature_map": "elu1", "front": True}}
    assert arguments.batch_size == 2  # the recipe stays


@pytest.mark.parametrize(
    ("config", "size", "beside_kept"),
    [
        (BloomConfig(), 64, 64),  # says no length
        (LlamaConfig(max_position_embeddings=512), 64, 64),
        (GPT2Config(n_positions=4096), 128, 120),
        (Gemma3Config(text_config={"max_position_embeddings": 8192}), 256, 240),
        (LlamaConfig(max_position_embeddings=131_072), 256, 240),
    ],
)
def test_windows_grow_with_the_context(config, size, beside_kept):
    assert PRESETS["hybrid"].options_for(config) == {**PRESETS["hybrid"].options, "size": size}
    assert PRESETS["linear"].options_for(config) == PRESETS["linear"].options

    tokens_kept = {"size": beside_kept, "heavy": beside_kept // 2, "sinks": 4}
    assert PRESETS["h2o"].options_for(config) == tokens_kept
    assert PRESETS["h2o"].options_for(config, 16) == {"size": 16, "heavy": 8, "sinks": 4}


def test_h2o_learns_from_the_text_alone():
    plan = resolve(told(preset="h2o"))
    assert [(stage.name, stage.tokens) for stage in plan.stages] == [("finetune", 1_000_000)]
    named = resolve(told(preset="h2o", stages="distill"))
    assert [(stage.name, stage.tokens) for stage in named.stages] == [("distill", 1_000_000)]
    assert (plan.arguments.patch, plan.arguments.options) == (
        "h2o",
        {"h2o": {"size": 64, "heavy": 32, "sinks": 4}},
    )
    with pytest.raises(OptionError, match="is an encoder: leave --preset out"):
        resolve_patch(told(preset="h2o"), AutoConfig.for_model("bert", architectures=["BertForMaskedLM"]))


def test_the_window_stays_where_it_cannot_be_dropped():
    both = {"compile": True, "gradient_checkpointing": True}
    assert told(**both).drop_window == 0
    assert told(compile=True).drop_window == 0.1
    with pytest.raises(OptionError, match="--drop-window needs"):
        told(**both, drop_window=0.1)


def test_named_stages_share_all_tokens():
    assert told(stages="distill", tokens=900).stage_tokens("distill") == 900
    named = told(stages="distill,finetune", tokens=900)
    assert [named.stage_tokens(name) for name in named.chosen_stages()] == [450, 450]
    assert told(stages="transfer,distill").stage_tokens("transfer") == 100_000


def test_who_trains_lora():
    assert [told().lora_rank(size, hybrid=True) for size in (10**6, 10**8)] == [0, 16]
    assert told(preset="plain").lora_rank(10**6, hybrid=True) == 16
    assert told(preset="linear").lora_rank(10**9, hybrid=False) == 0
    assert told(lora=4).lora_rank(10**6, hybrid=False) == 4
    assert learning_rate_for("distill", 1_430_000, 0, 1.0) == pytest.approx(5e-4, rel=0.05)
    assert learning_rate_for("finetune", 1_430_000, 0, 1.0) == pytest.approx(2.5e-4, rel=0.05)


def test_a_stage_finetune_without_distillation_learns_as_fast_as_one():
    def rate(stage, **options):
        plan = resolve(told(**options))
        (found,) = (each for each in plan.stages if each.name == stage)
        return stage_arguments(plan, found, parameters=10**8, lora=16, processes=1).lr

    assert rate("finetune", preset="h2o") == rate("distill", stages="distill")
    assert rate("finetune", stages="transfer,finetune") == rate("distill")
    assert rate("finetune", stages="distill,finetune") == pytest.approx(rate("distill") / 2, rel=0.05)
    assert rate("transfer", stages="transfer,finetune") == 1e-2


def test_encoders_and_patched_models_get_no_state_that_forgets():
    bert = AutoConfig.for_model("bert", architectures=["BertForMaskedLM"])
    arguments = resolve_patch(told(), bert)
    assert (arguments.patch, arguments.options) == ("hedgehog", None)
    llama = AutoConfig.for_model("llama")
    llama.linattn = {}
    assert resolve_patch(told(), llama).patch is None


@pytest.mark.parametrize("name", FORMER)
def test_former_presets_say_what_to_give(name, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--preset", name, "--output-dir", "refused"])
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert f"--preset {name} is gone" in line
    assert "--preset plain" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "half"}, "softmax layers to keep must be at least 1, or quarter, not 'half'"),
        ({"keep": 0}, "softmax layers to keep must be at least 1"),
        ({"keep": 1, "stages": "distill"}, "--keep ranks what stage transfer has trained"),
        ({"preset": "h2o", "keep": 1, "stages": "transfer"}, "and trains the choice"),
        ({"preset": "recall", "stages": "distill"}, "ranks what stage transfer has trained"),
        ({"preset": "recall", "patch": {"0": "elu1"}}, "give --patch one name for all"),
        ({"preset": "recall", "train_projections": True}, "leave out --train-projections"),
        ({"preset": "recall", "keep": 2}, "the model has 2 layers"),
    ],
)
def test_refused(options, message):
    with pytest.raises(OptionError, match=message):
        resolve(told(**options))


def test_help_is_in_groups(capsys):
    text = build_parser().format_help()
    titles = ["what one needs:", "patch and stages:", "training:", "expert options:"]
    places = [text.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert places[0] < text.index("\n  --preset") < places[1] < text.index("\n  --stages") < places[2]
    assert text.index("\n  --target") > places[3]


@pytest.mark.usefixtures("warm_start")
def test_recall_keeps_the_layers_that_are_ranked_first_and_what_the_others_have_learned(monkeypatch):
    argv = [*SMALL, "--preset", "recall", "--options", '{"size": 8}', "--tokens", "1280"]
    argv += ["--mixed-precision", "bf16"]
    monkeypatch.setattr(keep_layers, "TOKENS", 256)
    assert main([*argv, "--output-dir", "recalls"]) == 0
    chosen = json.loads(Path("recalls/layers/chosen.json").read_text())
    ranking = json.loads(Path("recalls/layers/results.json").read_text())
    assert chosen["layers"] == ranking["order"][:1]
    assert ranking["arguments"]["dtype"] == "bfloat16"
    # of two layers each alone is linear where the other is kept: nothing more to compare
    assert keep_layers._measured(Path("recalls/layers")) == len(ranking["rows"]) / 6 == 4 / 6
    [kept] = chosen["layers"]
    patches = ["window" if layer == kept else "window+gated" for layer in range(2)]
    for folder in ("recalls/layers/hybrid", "recalls/distill"):
        assert [row.patch for row in describe(from_pretrained(folder))] == patches, folder
    before, after = (
        from_pretrained(f"recalls/{name}").state_dict() for name in ("transfer", "layers/hybrid")
    )
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    page = Path("recalls/report.html").read_text()
    assert f"Layers that stay softmax over 60 tokens and the first: {kept} (by " in page
    # killed behind the ranking, it goes on with the same choice
    weights = weights_of("recalls/distill")
    for path in Path("recalls/distill").iterdir():
        path.unlink()
    monkeypatch.setattr(keep_layers, "run_jobs", None)
    assert main([*argv, "--output-dir", "recalls", "--resume"]) == 0
    assert weights_of("recalls/distill") == weights


@pytest.mark.usefixtures("surroundings")
def test_h2o_keeps_the_layers_that_are_ranked_first_before_anything_is_trained(monkeypatch):
    shutil.copytree("model", "longer")
    config = AutoConfig.from_pretrained("longer")
    config.max_position_embeddings = 512
    config.save_pretrained("longer")
    argv = [*SMALL, "--model", "longer", "--preset", "h2o", "--keep", "1", "--options", '{"size": 64}']
    argv += ["--tokens", "128"]
    assert main([*argv, "--output-dir", "recalls-h2o"]) == 0
    out = Path("recalls-h2o")
    [kept] = json.loads((out / "layers/chosen.json").read_text())["layers"]
    ranking = json.loads((out / "layers/results.json").read_text())
    assert kept == ranking["order"][0]
    asked = {name: ranking["arguments"][name] for name in ("tasks", "recall_lengths", "length", "samples")}
    assert asked == {"tasks": ["passkey"], "recall_lengths": [512], "length": 512, "samples": 2}
    patches = ["window" if layer == kept else "h2o" for layer in range(2)]
    sizes = [*json.loads((out / "sizes.json").read_text())["sizes"].values()]
    for folder in ("layers/hybrid", "finetune"):
        rows = [*describe(from_pretrained(out / folder))]
        assert [row.patch for row in rows] == patches, folder
        assert rows[1 - kept].options["h2o"]["size"] == sizes[1 - kept]
        assert rows[kept].options["window"] == {"size": 508, "sinks": 4}  # the model's context
    assert not (out / "layers/patched").exists()
    # nothing of the original is rounded or renamed on the way
    before, after = (from_pretrained(name).state_dict() for name in ("longer", "recalls-h2o/layers/hybrid"))
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    weights = weights_of(out / "finetune")
    for path in (out / "finetune").iterdir():
        path.unlink()
    monkeypatch.setattr(keep_layers, "run_jobs", None)
    assert main([*argv, "--output-dir", "recalls-h2o", "--resume"]) == 0
    assert weights_of(out / "finetune") == weights


@pytest.mark.usefixtures("surroundings")
def test_layers_are_not_ranked_by_weights_that_nothing_has_trained(capsys):
    argv = [*SMALL, "--preset", "h2o", "--keep", "1", "--patch", "hedgehog", "--tokens", "128"]
    assert main([*argv, "--output-dir", "refused"]) == 1
    assert "--keep would rank layers by weights of hedgehog" in capsys.readouterr().err
    assert not [*Path("refused").rglob("*")]


def test_recall_is_the_best_for_the_model_with_softmax_in_a_quarter(monkeypatch):
    small = resolve(told(preset="recall"))
    assert (small.arguments.preset, small.arguments.keep) == ("hybrid", "quarter")
    assert [stage.source for stage in small.stages] == ["model", "out/layers/hybrid"]
    monkeypatch.setattr("hf_linattn.convert.presets.SMALL", 1000)
    large = resolve(told(preset="recall"))
    assert (large.arguments.preset, large.arguments.keep, large.sizes_layers) == ("h2o", "quarter", True)
    assert [stage.source for stage in large.stages] == ["out/layers/hybrid"]
    few = resolve(told(keep=1))
    assert (few.arguments.preset, few.arguments.keep) == ("h2o", 1)
    assert resolve(told(keep=1, patch="window+gated")).arguments.preset == "hybrid"


def test_kept_layers_see_the_context_unless_it_would_take_much_memory(monkeypatch):
    plan = resolve(told(keep=1))
    models = {length: LlamaConfig(max_position_embeddings=length) for length in (64, 8192, 8193)}
    for config, want in [*zip(models.values(), (60, 8188, None), strict=True), (BloomConfig(), None)]:
        monkeypatch.setattr(keep_layers, "load_config", lambda name, config=config: config)
        assert keep_layers._window(plan) == want


@pytest.mark.full
def test_two_processes_keep_the_same_layer():
    """The first ranks the layers while the second waits; both train the hybrid that it leaves."""
    argv = [*SMALL, "--preset", "recall", "--options", '{"size": 8}', "--tokens", "1280"]
    in_two_processes("-m", "hf_linattn.convert", *argv, "--output-dir", "recalls-2", launcher=TORCHRUN)
    [kept] = json.loads(Path("recalls-2/layers/chosen.json").read_text())["layers"]
    trained = describe(from_pretrained("recalls-2/distill"))
    assert [row.patch for row in trained] == [
        "window" if layer == kept else "window+gated" for layer in range(2)
    ]
