"""The conversion command: what it refuses, each in one line, and what its options mean."""
# ruff: noqa: F401  fixtures are imported, and then named as arguments

import math
from pathlib import Path

import pytest
import torch
from helpers.fixtures_convert import BASE, STAGES
from helpers.fixtures_finetune import surroundings, workplace
from helpers.tiny_models import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import registry
from hf_linattn.convert import ConvertArguments, convert
from hf_linattn.convert.__main__ import main
from hf_linattn.convert.arguments import build_parser, learning_rate_for
from hf_linattn.convert.outputs import conversion_folder, save_source
from hf_linattn.convert.presets import default_patch
from hf_linattn.convert.resolve import resolve, with_learned_front
from hf_linattn.errors import DataError, OptionError, TrainingError, UnknownPatchError
from hf_linattn.finetune.__main__ import main as finetune
from hf_linattn.registry import find, parse

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--patch", "elu1"], "stage transfer trains the parameters of the patch, and elu1 has none"),
        (["--patch", "softmax1", "--learn-front"], "'softmax1' has no feature map"),
        (["--patch", "hedgehogs"], "hedgehogs"),
        (["--model", "nowhere"], "cannot load --model nowhere"),
        (["--data", "tiny.txt"], "fewer than one block"),
        (["--output-dir", "model"], "--model itself"),
        (["--tokenizer", "nowhere"], "no folder nowhere, and no tokenizer of this name on the Hub"),
        (["--patch", "gated", "--target", "weights"], "'gated' makes its gates of the values"),
        (["--preset", "h2o", "--stages", "transfer,finetune"], "stage out (--stages finetune)"),
    ],
)
def test_one_clear_line(argv, message, capsys):
    assert main([*BASE, "--transfer-tokens", "128", "--output-dir", "refused", *argv]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not Path("refused").exists()


def test_nothing_to_transfer_leaves_no_files():
    argv = [*BASE, "--transfer-tokens", "128", "--output-dir", "untouched", "--patch", "elu1"]
    assert main(argv) == 1
    assert not Path("untouched").exists()


def test_a_model_in_memory_is_not_taken_for_that_of_a_conversion_before():
    first, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    second = AutoModelForCausalLM.from_pretrained("model")
    second.lm_head.weight.data.mul_(2)
    source = str(Path("out", "original"))
    for _ in range(2):  # the second finds it there
        assert save_source(first, tokenizer, "out") == (source, source)
    with pytest.raises(
        TrainingError, match="holds another model, that of a conversion before: choose another"
    ):
        save_source(second, tokenizer, "out")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(source).lm_head.weight, first.lm_head.weight)
    assert save_source(second, tokenizer, "out", overwrite=True) == (source, source)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(source).lm_head.weight, second.lm_head.weight)
    assert AutoTokenizer.from_pretrained(source).vocab_size == tokenizer.vocab_size


def test_a_model_in_memory_leaves_nothing_when_it_is_refused():
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    Path("kept").mkdir()
    given = {"tokenizer": tokenizer, "cpu": True}
    for folder in ("new/folder", "kept"):
        with pytest.raises(DataError, match="no such file"):
            convert(model, "nowhere.txt", output_dir=folder, **given)
        model.save_pretrained = lambda _: pytest.fail("it was written although the options are wrong")
        with pytest.raises(UnknownPatchError, match="elu2"):
            convert(model, "nowhere.txt", patch="elu2", output_dir=folder, **given)
        with pytest.raises(OptionError, match="options must be a dict, got"):
            convert(model, "nowhere.txt", options='{"size": 8}', output_dir=folder, **given)
        del model.save_pretrained
    assert not Path("new").exists()
    assert list(Path("kept").iterdir()) == []


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Folders of models for any of these texts: one that learns 40 positions, and two encoder-decoders."""
    folder = tmp_path_factory.mktemp("others")
    bart = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 1024}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    t5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 1024}
    gpt2 = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 40, "vocab_size": 1024}
    build("GPT2LMHeadModel", dtype=torch.float32, **gpt2).save_pretrained(folder / "gpt2")
    build("BartForConditionalGeneration", dtype=torch.float32, **bart, **heads).save_pretrained(
        folder / "bart"
    )
    build("T5ForConditionalGeneration", dtype=torch.float32, **t5).save_pretrained(folder / "t5")
    return folder


@pytest.mark.parametrize("command", [main, finetune])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_is_refused(command, name, others, capsys):
    own = BASE if command is main else [*BASE[: BASE.index("--preset")], "--max-steps", "2"]
    words = [*own, "--tokenizer", "model", "--model", str(others / name), "--output-dir", "refused"]
    assert command(words) == 1
    assert "is an encoder-decoder" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not Path("refused").exists()


@pytest.mark.parametrize(
    "argv",
    [["--block-size", "48"], ["--stages", "transfer,finetune", "--finetune-length", "48"]],
)
def test_rows_longer_than_the_positions_are_refused_before_anything_is_trained(argv, others, capsys):
    words = [*BASE, "--tokenizer", "model", "--model", str(others / "gpt2"), "--output-dir", "refused"]
    assert main([*words, "--tokens", "512", *argv]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "rows of 48 tokens are longer than the model's 40 positions" in error
    assert "--finetune-length" in error
    assert not Path("refused").exists()


def test_what_was_measured_stays_in_a_folder_of_any_name(tmp_path):
    folder = conversion_folder(str(tmp_path / "original"))

    def fail():
        (folder.path / "original").mkdir(parents=True)
        (folder.path / "sizes.json").write_text("{}")
        raise DataError("too short")

    with pytest.raises(DataError, match="too short"), folder.leaving_nothing("original"):
        fail()
    assert [path.name for path in folder.path.iterdir()] == ["sizes.json"]


def test_a_tokenizer_that_does_not_fit(capsys):
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens(["the cat"])
    tokenizer.save_pretrained("larger")
    assert main([*BASE, "--tokenizer", "larger", "--transfer-tokens", "128", "--output-dir", "misfit"]) == 1
    assert "the tokenizer gives token 257, the model knows 257" in capsys.readouterr().err


def test_a_loss_that_is_no_number(capsys):
    model = AutoModelForCausalLM.from_pretrained("model")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    model.save_pretrained("broken")
    AutoTokenizer.from_pretrained("model").save_pretrained("broken")
    argv = ["--model", "broken", *BASE[2:], "--transfer-tokens", "128", "--output-dir", "nan"]
    assert main(argv) == 1
    assert "the validation loss of broken is nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "transfer,stir"}, "'stir' is none of transfer, distill, finetune"),
        ({"transfer_tokens": 0, "distill_tokens": 0}, "every one has 0 tokens"),
        ({"drop_window": 1.5}, "--drop-window must be at most 1"),
        ({"ce_weight": -1.0}, "--ce-weight must be at least 0"),
        ({"patience": 2}, "give --eval-data"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
        ({"preset": "slow"}, "--preset must be one of auto, recall, hybrid, linear, h2o, plain"),
        ({"block_size": 1}, "--block-size must be at least 2"),
        ({"seed": 2**32}, "--seed must be at most 4294967295"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        ConvertArguments("model", "train.txt", "out", **options)


def test_stages_and_rates():
    told = ConvertArguments("model", "train.txt", "out", finetune_tokens=99, finetune_length=2048)
    assert told.chosen_stages() == list(STAGES)
    assert [told.length(stage) for stage in STAGES] == [512, 512, 2048]
    assert ConvertArguments("model", "t", "o").chosen_stages() == ["transfer", "distill"]
    assert learning_rate_for("distill", 1_430_000, 0) == pytest.approx(1e-3, rel=0.05)
    assert learning_rate_for("distill", 2_000_000_000, 0) == 1e-4
    assert learning_rate_for("distill", 10**13, 0) == 1e-5
    assert with_learned_front("window+elu1+logn")[0] == "window+linear+logn"
    assert with_learned_front("window+gated") == ("window+gated", {"gated": {"front": True}})
    asked = ["--patch", "window+gated", "--options", '{"size": 8, "feature_map": "taylor2"}', "--learn-front"]
    given = vars(build_parser().parse_args([*BASE, *asked, "--output-dir", "out"]))
    told = resolve(ConvertArguments(**given)).arguments
    parts = parse(told.patch, told.options).options
    assert parts == {"window": {"size": 8}, "gated": {"front": True, "feature_map": "taylor2"}}
    with pytest.raises(OptionError, match="no feature map"):
        with_learned_front("softmax1")


def test_the_default_patch_is_not_inherited(monkeypatch):
    class Derived(find("hedgehog")):
        """Comes before hedgehog in the alphabet."""

    monkeypatch.setitem(registry._PATCHES, "a_derived_one", Derived)
    assert default_patch("conversion") == "hedgehog"


def test_error_types():
    with pytest.raises(TrainingError, match="cannot load --model nowhere"):
        convert("nowhere", "train.txt", output_dir="none")


@pytest.mark.parametrize(
    "argv",
    [
        ["--block-size", "256"],
        ["--block-size", "256", "--preset", "h2o"],
        ["--block-size", "4", "--finetune-tokens", "9", "--finetune-length", "64"],
    ],
)
def test_a_text_too_short_for_its_rows_leaves_nothing(argv, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("One two three four.")
    assert main(["--model", "model", "--data", str(text), "--cpu", *argv, "--output-dir", str(out)]) == 1
    assert "fewer than one block" in capsys.readouterr().err
    assert not out.exists()
