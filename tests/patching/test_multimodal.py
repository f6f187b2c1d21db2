"""Models that read images and write text: a patch is for the text, right with an image in the prompt."""

import pytest
import torch
from helpers.family_checks import check
from helpers.family_configs import nested
from helpers.multimodal import (
    END,
    IMAGE,
    MODELS,
    generated,
    image_features,
    multimodal,
    text_alone,
    with_types,
)
from helpers.oracle import as_oracle
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

from hf_linattn import describe, from_pretrained, is_linear, patch_model, unpatch_model
from hf_linattn.errors import UnsupportedMaskError, UnsupportedModelError
from hf_linattn.patching.discovery import find_sites

GEMMA, QWEN = "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
CAUSAL = [name for name in MODELS if name != GEMMA]
LLAVA, SIGLIP = "LlavaForConditionalGeneration", "Lfm2VlForConditionalGeneration"
HYBRID = {"size": 8, "sinks": 2}


def towers(model):
    return {site.name for site in find_sites(model) if site.tower}


def patched(model):
    return {row.module for row in describe(model) if row.patch != "softmax"}


@pytest.mark.parametrize("name", MODELS)
def test_a_name_alone_is_for_the_text(name):
    model, inputs = multimodal(name)
    tower = towers(model)
    assert tower
    assert all("vision" in site or "visual" in site for site in tower)
    with torch.no_grad():
        before, logits = image_features(model, inputs), model(**inputs).logits
        patch_model(model, "elu1", sliding="global")
        assert patched(model) == {site.name for site in find_sites(model)} - tower
        assert torch.equal(image_features(model, inputs), before)
        assert is_linear(model)
        assert "for images or sounds" in str(describe(model))
        unpatch_model(model)
        assert torch.equal(model(**inputs).logits, logits)


@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_it_is_for_the_text_where_the_head_that_writes_is_not_there(name):
    model, inputs = multimodal(name)
    whole, bare = towers(model), model.model  # what AutoModel loads
    assert {f"model.{site}" for site in towers(bare)} == whole
    before = image_features(model, inputs)
    for plan in ("elu1", {0: "elu1"}):
        patch_model(bare, plan, sliding="global")
        assert patched(bare) == {
            site.name
            for site in find_sites(bare)
            if not site.tower and (plan == "elu1" or site.layer_idx == 0)
        }
        assert torch.equal(image_features(model, inputs), before)


@pytest.mark.parametrize("part", ["whole", "bare"])
def test_a_tower_is_not_patched_in_the_place_of_a_text_without_attention(part):
    config = nested(Lfm2VlConfig, text_config={"layer_types": ["conv", "conv"]})
    model = Lfm2VlForConditionalGeneration(config)
    model = model if part == "whole" else model.model
    with pytest.raises(UnsupportedModelError, match="its text decoder has no attention module"):
        patch_model(model, "elu1")
    patch_model(model, {"*vision*": "elu1"})
    assert patched(model) == towers(model)


@pytest.mark.parametrize("name", CAUSAL)
def test_images_in_the_prompt_equal_the_oracle(name):
    model, inputs = multimodal(name)
    result = check(name, model, inputs, cached=False)  # the tower is patched too
    assert result.status == "right", f"{result.reason} {result.patches}"
    assert result.modules[0] == result.modules[1]


def test_a_video_in_the_prompt_equals_the_oracle():
    model, inputs = multimodal(QWEN)
    model.config.video_token_id = video = END + 1
    ids, kinds = inputs.pop("input_ids")[0], inputs.pop("mm_token_type_ids")[0]
    place = int((ids == IMAGE).nonzero()[0])
    ids, kinds = (torch.cat([x[:place], x[ids == IMAGE], x[place:]])[None] for x in (ids, kinds))
    inputs = {
        "input_ids": torch.where(ids == IMAGE, video, ids),
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * kinds,
        "pixel_values_videos": torch.cat([inputs["pixel_values"], inputs["pixel_values"].flip(0)]),
        "video_grid_thw": inputs["image_grid_thw"] * torch.tensor([2, 1, 1]),
    }
    result = check(QWEN, model, inputs, cached=False)
    assert result.status == "right", f"{result.reason} {result.patches}"
    assert result.modules[0] == result.modules[1]


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("patch", "options"), [("elu1", {}), ("window+gated", HYBRID), ("delta", {})])
def test_generated_tokens_go_on_from_the_image(name, patch, options):
    model, inputs = multimodal(name)
    patch_model(model, patch, options=options)
    got, inputs = generated(model, inputs)
    with torch.no_grad():
        whole = model(**inputs, use_cache=False)
    want = whole.logits[:, -got.shape[1] :]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_layers_are_those_of_the_text():
    model, _ = multimodal(LLAVA)
    for name in towers(model):
        model.get_submodule(name).layer_idx = 0
    patch_model(model, {0: "elu1"})
    assert patched(model) == {"model.language_model.layers.0.self_attn"}
    patch_model(model, {"0-1": "elu1"})
    assert patched(model) == {site.name for site in find_sites(model)} - towers(model)


def test_a_plan_that_names_the_tower_reaches_it():
    model, inputs = multimodal(LLAVA)
    patch_model(model, {"*vision_tower*": "elu1"})
    assert patched(model) == towers(model)
    patch_model(model, {"*": "elu1"})
    assert patched(model) == {site.name for site in find_sites(model)}
    with torch.no_grad():
        got = model(**inputs).logits
        unpatch_model(model)
        with as_oracle(model, "elu1"):
            assert torch.allclose(got, model(**inputs).logits)


def test_a_patched_folder_comes_back_with_its_tower_as_it_was(tmp_path):
    model, inputs = multimodal(SIGLIP)
    patch_model(model, "window+gated", options=HYBRID)
    with torch.no_grad():
        want = model(**inputs).logits
        model.save_pretrained(tmp_path)
        again = from_pretrained(str(tmp_path), dtype=torch.float64).eval()
        assert type(again) is type(model)
        assert patched(again) == patched(model)
        assert torch.equal(again(**inputs).logits, want)


@pytest.mark.parametrize("training", [False, True])
def test_gemma_reads_prompts_without_an_image_that_say_so(training):
    model, inputs = multimodal(GEMMA)
    model.train(training)
    text = text_alone(inputs)
    for patch in ("elu1", "window"):
        patch_model(model, patch, sliding="global")
        want = model(**text, labels=text["input_ids"])
        got = model(**with_types(text), labels=text["input_ids"])
        assert torch.equal(got.logits, want.logits)


def test_gemma_lets_tokens_of_an_image_see_one_another():
    model, inputs = multimodal(GEMMA)
    inputs = with_types(inputs)
    with torch.no_grad():
        with as_oracle(model, "softmax1"):
            want = model(**inputs).logits
        got = patch_model(model, {"*": "softmax1"})(**inputs).logits
        assert torch.allclose(got, want)
        patch_model(model, "elu1")
        with pytest.raises(UnsupportedMaskError, match="tokens of an image that see one another"):
            model(**inputs)
