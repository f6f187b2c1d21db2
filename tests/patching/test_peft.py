"""Adapters of peft: rows of several, patches put on too late, adapters of other patches."""

import warnings

import pytest
import torch
from helpers.tiny_models import llama, tokens

from hf_linattn import from_pretrained, patch_model
from hf_linattn.errors import CheckpointError, UnsupportedCallError

peft = pytest.importorskip("peft")
# peft asks transformers for an attribute that transformers 5.23 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def lora(saved=("linattn",)):
    return peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=list(saved), init_lora_weights=False
    )


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("active", ["default", "other"])
def test_rows_of_adapters_with_their_own_patch_are_refused(rows, active):
    model = peft.get_peft_model(patch_model(llama(), "gated"), lora())
    model.add_adapter("other", lora(saved=()))
    model.eval().set_adapter(active)
    names = ["default", *["other"] * (rows - 1)]
    with pytest.raises(UnsupportedCallError, match=r"layers\.0.*rows of one adapter at a time.*set_adapter"):
        model(tokens(rows, 9), adapter_names=names)


def test_a_patch_that_the_adapters_will_not_hold_is_told():
    model = peft.get_peft_model(llama(), lora())
    with pytest.warns(
        UserWarning, match=r"not hold what 'gated' learns.*Patch first.*modules_to_save=\['linattn'\]"
    ):
        patch_model(model, "gated")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patch_model(model, "elu1")  # learns nothing
        peft.get_peft_model(patch_model(llama(), "gated"), lora())


def test_whole_attentions_that_peft_trains_as_copies_are_saved_once_they_are_merged(tmp_path):
    lora = peft.LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"])
    model = peft.get_peft_model(patch_model(llama(), "elu1"), lora).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.1)
    ids = tokens(1, 9)
    want = model(ids).logits
    model.merge_and_unload().save_pretrained(tmp_path)
    torch.testing.assert_close(from_pretrained(tmp_path)(ids).logits, want)


def adapter_of(patch, folder, saved=None, **options):
    """The folder of an adapter that was trained with this patch."""
    model = llama() if patch is None else patch_model(llama(), patch, options=options)
    peft.get_peft_model(model, lora(saved or ())).save_pretrained(folder)
    return folder


def loaded(folder, patch, way="peft", **options):
    model = llama() if patch is None else patch_model(llama(), patch, options=options)
    if way == "peft":
        return peft.PeftModel.from_pretrained(model, folder)
    if way == "transformers":
        return model.load_adapter(str(folder))
    wrapped = peft.get_peft_model(model, lora(()))
    return wrapped.load_adapter(folder, "other")


@pytest.mark.parametrize("way", ["peft", "transformers", "second"])
@pytest.mark.parametrize(
    ("patch", "options", "has"),
    [(None, {}, "no patch"), ("softmax1", {}, "'softmax1'"), ("window", {"size": 9}, "'window' .*9")],
)
def test_an_adapter_that_was_trained_with_another_patch_is_told(patch, options, has, way, tmp_path):
    adapter_of("window", tmp_path, size=8)
    with pytest.warns(
        UserWarning, match=rf"trained on a model with 'window' .*8.*this one has {has}.*by patch_model"
    ):
        loaded(tmp_path, patch, way, **options)


@pytest.mark.parametrize("way", ["peft", "transformers", "second"])
@pytest.mark.parametrize(("trained", "here"), [("window", "window"), (None, None), (None, "elu1")])
def test_adapters_that_fit_or_name_no_patch_load_without_a_word(trained, here, way, tmp_path):
    adapter_of(trained, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded(tmp_path, here, way)


@pytest.mark.parametrize("patch", [None, "elu1", "fox"])
def test_weights_of_a_patch_that_is_not_there_are_refused(patch, tmp_path):
    adapter_of("gated", tmp_path, saved=["linattn"])
    model = llama() if patch is None else patch_model(llama(), patch)
    with pytest.raises(CheckpointError, match=r"with 'gated'.*put the same patch on.*have no place here"):
        peft.PeftModel.from_pretrained(model, tmp_path)
    assert not hasattr(model, "peft_config")
    assert not any("lora" in name for name, _ in model.named_modules())


def test_a_config_that_was_saved_serves_another_model(tmp_path):
    config = lora(())
    peft.get_peft_model(patch_model(llama(), "elu1"), config).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        peft.get_peft_model(llama(), config).save_pretrained(tmp_path)
        loaded(tmp_path, None)


def test_virtual_tokens_and_adapters_of_transformers_name_their_patch(tmp_path):
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(patch_model(llama(), "elu1"), prompt).save_pretrained(tmp_path / "prompt")
    model = patch_model(llama(), "elu1")
    model.add_adapter(lora(()))
    model.save_pretrained(tmp_path / "transformers")
    for kind in ("prompt", "transformers"):
        with pytest.warns(UserWarning, match=r"trained on a model with 'elu1', and this one has no patch"):
            loaded(tmp_path / kind, None)
