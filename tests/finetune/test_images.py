"""A model that reads images is trained on text: its tower stays, and its folder reads images as before."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

from pathlib import Path

import pytest
import torch
from helpers.fixtures_finetune import surroundings, workplace
from helpers.multimodal import multimodal
from transformers import AutoModelForImageTextToText, AutoTokenizer

from hf_linattn import describe
from hf_linattn.convert.__main__ import main as convert

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
    trained = AutoModelForImageTextToText.from_pretrained("converted/distill")
    assert {row.patch for row in describe(trained) if not row.tower} == {"window+gated"}
    assert {row.patch for row in describe(trained) if row.tower} == {"softmax"}
    pixels = inputs["pixel_values"].float()
    got, want = (part.get_image_features(pixels).pooler_output for part in (trained, model.eval()))
    assert torch.equal(got[0], want[0])
    assert trained(**{**inputs, "pixel_values": pixels}).logits.isfinite().all()
