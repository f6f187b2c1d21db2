"""Adapters of peft that hold weights of a patch: rows of several adapters, and patches put on too late."""

import warnings

import pytest
import torch
from helpers.tiny_models import llama, tokens

from hf_linattn import from_pretrained, patch_model
from hf_linattn.errors import UnsupportedCallError

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
