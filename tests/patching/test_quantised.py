"""Bases in 8 and 4 bits: patched, trained with LoRA, saved; what is learned in a patch is never quantised."""

import pytest
import torch
from helpers import learned_patches, tiny_models
from helpers.learned_patches import logits
from helpers.oracle import as_oracle
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from hf_linattn import from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.errors import CheckpointError
from hf_linattn.patching.interface import NAME

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which differ from version to version
IDS = tiny_models.tokens(2, 24)
KINDS = ("torchao", "torchao in place", "bitsandbytes 8", "bitsandbytes 4")
PATCHES = {"elu1": {}, "gated": {}, "window+hedgehog": {"size": 8}, "softmax1+logn": {"train_length": 32}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_models.llama(2, dtype=torch.float32, hidden_size=64, head_dim=16).save_pretrained(folder)
    return folder


def settings(kind):
    """What from_pretrained gets."""
    library, _, bits = kind.partition(" ")
    pytest.importorskip(library)
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    options = {"8": {"load_in_8bit": True}, "4": {"load_in_4bit": True}}
    return BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options[bits])


def load(kind, folder, dtype=torch.float32):
    config = settings(kind)
    if kind != "torchao in place":
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    return quantised(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def quantised(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def learned(model):
    """Parameters of the patch, by the module that it was put on."""
    sites = [module for module in model.modules() if NAME in module._modules]
    return {site: dict(site._modules[NAME].named_parameters()) for site in sites}


def in_float(model, dtype=torch.float32):
    parts = [parameter for parameters in learned(model).values() for parameter in parameters.values()]
    return all(type(part) is torch.nn.Parameter and part.dtype == dtype for part in parts)


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_is_patched_in_place(base, kind, patch):
    options = PATCHES[patch]
    model = load(kind, base)
    before = logits(model, IDS)
    patch_model(model, patch, options=options)
    assert in_float(model)
    got, weights = logits(model, IDS), learned(model)
    text = model.generate(IDS[:1, :8], max_new_tokens=6, do_sample=False)
    assert torch.equal(logits(unpatch_model(model), IDS), before)
    with as_oracle(model, patch, learned=weights, **options):
        want = logits(model, IDS)
        grown = tiny_models.grow(model, IDS[:1, :8], 6)
    # kernels of bitsandbytes round activations, and the last bits of a sum decide which way
    assert tiny_models.distance(got, want) < (0.1 if "bits" in kind else 1e-4)
    assert tiny_models.distance(got, before) > 0.1
    assert torch.equal(text, grown)


@pytest.mark.parametrize(
    ("patch", "dtype"), [("gated", torch.float32), ("window+hedgehog", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_a_quantised_base(base, kind, patch, dtype, tmp_path):
    peft = pytest.importorskip("peft")

    def prepared():
        model = patch_model(load(kind, base, dtype), patch, options=PATCHES[patch])
        return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    model = prepared()
    assert in_float(model, dtype if kind == "torchao" else torch.float32)  # peft leaves torchao's as they are
    lora = peft.LoraConfig(
        r=4, target_modules="all-linear", exclude_modules=rf".*\.{NAME}(\..*)?", modules_to_save=[NAME]
    )
    tuned = peft.get_peft_model(model, lora)
    trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert {True, False} == {f".{NAME}." in name for name in trained}
    assert all("lora" in name or f".{NAME}." in name for name in trained)
    begun = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = tuned(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(not torch.equal(parameter, begun[name]) for name, parameter in trained.items())
    want = logits(tuned.eval(), IDS)
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(prepared(), tmp_path)
    assert torch.equal(logits(again, IDS), want)
    prompt = {"input_ids": IDS[:1, :8], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.generate(**prompt), tuned.generate(**prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "place" not in kind])
@pytest.mark.parametrize("patch", PATCHES)
def test_saved_and_loaded(base, kind, dtype, patch, tmp_path):
    model = patch_model(load(kind, base, dtype), patch, options=PATCHES[patch])
    assert in_float(model, dtype)
    want = logits(model, IDS)
    model.save_pretrained(tmp_path)
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = loader(tmp_path)
        assert is_patched(loaded)
        assert in_float(loaded, dtype)
        assert torch.equal(logits(loaded, IDS), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_folder_is_quantised_at_load_and_its_maps_are_not(base, kind, dtype, tmp_path):
    with learned_patches.registered():  # its map is an nn.Linear, which these libraries look for
        model = AutoModelForCausalLM.from_pretrained(base)
        patch_model(model, {"0": learned_patches.NAME, "1": "hedgehog"}).save_pretrained(tmp_path / "patched")
        loaded = load(kind, tmp_path / "patched", dtype)
        assert is_patched(loaded)
        assert type(loaded.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
        if "place" not in kind:
            assert in_float(loaded)
        same = patch_model(load(kind, base, dtype), {"0": learned_patches.NAME, "1": "hedgehog"})
        same.load_state_dict(
            {name: p for name, p in model.state_dict().items() if f".{NAME}." in name}, strict=False
        )
        bound = 0.2 if kind == "torchao in place" or dtype == torch.float16 else 1e-4
        assert tiny_models.distance(logits(loaded, IDS), logits(same, IDS)) < bound


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "place" not in kind])
def test_without_the_library_the_folder_says_what_to_install(base, kind, tmp_path, monkeypatch):
    patch_model(load(kind, base), "elu1").save_pretrained(tmp_path)
    library, _, bits = kind.partition(" ")
    module = "torchao" if library == "torchao" else f"bnb_{bits}bit"
    monkeypatch.setattr(
        f"transformers.quantizers.quantizer_{module}.is_{library}_available", lambda *_: False
    )
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ImportError, match=f"requires {library}.*pip install|pip install.*{library}"):
            loader(tmp_path)


def test_what_cannot_be_saved_says_so_and_leaves_the_folder(base, tmp_path):
    pytest.importorskip("torchao")
    model = patch_model(load("torchao in place", base), "elu1")
    with pytest.raises(CheckpointError, match="TorchAoConfig"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(CheckpointError, match="TorchAoConfig"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    assert is_patched(model)
