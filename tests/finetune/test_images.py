"""A model that reads images or hears is trained on text: what is beside the text stays as it was."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

from pathlib import Path

import pytest
import torch
from helpers.fixtures_finetune import surroundings, workplace
from helpers.multimodal import multimodal, text_alone
from helpers.sounds import MODELS as HEARING
from helpers.sounds import hearing, omni, transcriber
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from hf_linattn import describe, patch_model
from hf_linattn.convert.__main__ import main as convert
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.finetune.model import check_fit, choose_trained, freeze_beside_text
from hf_linattn.training.objectives import build_objective

pytestmark = pytest.mark.usefixtures("surroundings")
DATA = ("--data", "train.txt", "--block-size", "32", "--batch-size", "4", "--cpu")


def test_convert_takes_a_model_that_reads_images_with_nothing_said(workplace):
    model, inputs = multimodal("LlavaForConditionalGeneration", vocab_size=257)
    model.float().save_pretrained("pictures")
    AutoTokenizer.from_pretrained("model").save_pretrained("pictures")
    Path("pictures/preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    assert convert(["--model", "pictures", *DATA, "--tokens", "512", "--output-dir", "converted"]) == 0
    for stage in ("transfer", "distill"):
        assert (
            Path(f"converted/{stage}/preprocessor_config.json").read_bytes()
            == Path("pictures/preprocessor_config.json").read_bytes()
        )
    assert "pipeline_tag: image-text-to-text" in Path("converted/distill/README.md").read_text()
    trained = AutoModelForImageTextToText.from_pretrained("converted/distill")
    assert {row.patch for row in describe(trained) if not row.tower} == {"window+gated"}
    assert {row.patch for row in describe(trained) if row.tower} == {"softmax"}
    pixels = inputs["pixel_values"].float()
    got, want = (part.get_image_features(pixels).pooler_output for part in (trained, model.eval()))
    assert torch.equal(got[0], want[0])
    assert trained(**{**inputs, "pixel_values": pixels}).logits.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "LlavaForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "GraniteSpeechForConditionalGeneration",
        "Phi4MultimodalForCausalLM",
    ],
)
@pytest.mark.parametrize("lora", [0, 2])
def test_what_text_does_not_reach_is_not_trained(name, lora, workplace):
    """A weight without a gradient stops processes that share their gradients."""
    model, inputs = hearing(name) if name in HEARING else multimodal(name)
    patch_model(model, "hedgehog")
    assert "for images or sounds stay as they are" in freeze_beside_text(model)
    arguments = FinetuneArguments(model=name, data="", output_dir="out", lora=lora)
    tokenizer = AutoTokenizer.from_pretrained("model")
    trained = choose_trained(model, arguments, build_objective("causal", tokenizer, 32, 0))
    trained.train()(**text_alone(inputs)).logits.sum().backward()
    wanted = {key for key, weight in trained.named_parameters() if weight.requires_grad}
    assert wanted == {key for key, weight in trained.named_parameters() if weight.grad is not None}
    assert any("lora" in key for key in wanted) is bool(lora)


@pytest.mark.parametrize("make", [lambda: transcriber()[0], omni])
def test_what_reads_more_than_text_is_not_trained_on_text(make):
    model = make()
    with pytest.raises(UnsupportedModelError, match="has no embedding of text alone"):
        check_fit(model, build_objective("causal", AutoTokenizer.from_pretrained("model"), 32, 0))


def test_a_model_of_text_alone_is_trained_as_a_whole(workplace):
    model = AutoModelForCausalLM.from_pretrained("model")
    assert freeze_beside_text(model) == ""
    assert all(weight.requires_grad for weight in model.parameters())
