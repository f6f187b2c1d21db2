"""Families with attention code of their own: adapters route them while they are patched."""

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from helpers import properties, tiny_models
from helpers.family_checks import check, check_causal
from helpers.family_configs import TINY, fields
from helpers.family_models import causal_model, prepare, token_batch
from helpers.oracle import as_oracle

from hf_linattn import bypassed, describe, from_pretrained, patch_model, patched, unpatch_model
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.eval.diagnose.attention_weights import watching
from hf_linattn.patching import adapters
from hf_linattn.patching.adapters.base import ADAPTERS

ALIBI = ("bloom", "falcon, alibi", "mpt")
UNPACKED = (*ALIBI, "falcon", "falcon, grouped", "rembert", "roformer")  # no positions reach their masks
CASES = {"gptj": ("elu1", "softmax1+logn", "window, sinks", "gated"), "bloom": ("softmax1+logn",)}
PAIRS = [
    (family, case)
    for family in properties.ADAPTED
    for case in CASES.get(family, ("softmax1+logn",) if family in ALIBI else ("elu1", "softmax1+logn"))
]


def spec_of(family):
    return "softmax1" if family in ALIBI else "elu1"


def batch():
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 40), 6)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": tiny_models.positions(mask)}


def logits(model):
    with torch.no_grad():
        return model(**batch(), use_cache=False).logits


@pytest.mark.parametrize(("family", "case"), PAIRS)
class TestProperties:
    def test_forward_is_the_oracle(self, family, case):
        properties.check_forward(family, case, (1, 65))

    def test_gradient_is_the_oracle(self, family, case):
        properties.check_gradient(family, case)

    def test_padding(self, family, case):
        if family != "roformer":  # it counts its positions from the padding on, and takes no others
            properties.check_padding(family, case)

    def test_packing(self, family, case):
        if family not in UNPACKED:
            properties.check_packing(family, case)

    def test_decode_equals_the_forward(self, family, case):
        properties.check_decode(family, case, (0, 40, 41, 42, 100))

    def test_unpatch(self, family, case):
        properties.check_unpatch(family, case)

    def test_save(self, family, case, tmp_path):
        properties.check_save(family, case, tmp_path)


@pytest.mark.parametrize("name", ["xglm", "trocr", "mvp", "megatron-bert", "big_bird", "openai-gpt", "xlm"])
def test_other_types_equal_the_oracle(name):
    result = check_causal(name, ("elu1", "softmax1"))
    assert result.status == "right", f"{result.reason} {result.patches}"


@pytest.mark.parametrize("name", ["MPNetModel", "FlaubertModel", "RoFormerModel"])
def test_encoders_equal_the_oracle(name):
    cls = getattr(transformers, name)
    known = {name: value for name, value in TINY.items() if name in {*fields(cls.config_class)}}
    sizes = {**known, "is_decoder": False, "emb_dim": 32, "pad_token_id": 1}
    config = cls.config_class(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = prepare(cls(config), torch.float64)
    patches = ("softmax1",) if name == "MPNetModel" else ("elu1", "softmax1")
    result = check(name, model, token_batch(), patches, cached=False)
    assert result.status == "right", f"{result.reason} {result.patches}"
    if name == "MPNetModel":
        with pytest.raises(UnsupportedModelError, match="position bias"):
            patch_model(model, "elu1")


def test_both_streams_of_xlnet_equal_the_oracle():
    config = transformers.XLNetConfig(vocab_size=97, d_model=32, n_layer=2, n_head=4, d_inner=64, mem_len=8)
    model = prepare(transformers.XLNetLMHeadModel(config), torch.float32)
    hidden = torch.rand(2, 20, 20, generator=torch.Generator().manual_seed(1)) > 0.5
    hidden[:, :, 0] = False  # every target sees something
    inputs = {
        "input_ids": tiny_models.tokens(2, 20),
        "perm_mask": hidden.float(),
        "target_mapping": torch.eye(20)[None, [7, 11, 19]].repeat(2, 1, 1),
        "token_type_ids": (torch.arange(20) > 9).long()[None].repeat(2, 1),
    }
    with torch.no_grad():
        base = model(**inputs)
        for patch in ("softmax", "softmax1"):
            with as_oracle(model, patch) as seen:
                want = model(**inputs, mems=base.mems).logits
            assert len(seen.calls) == 4
            with patched(model, patch):
                properties.close(model(**inputs, mems=base.mems).logits, want, 1e-5)
        assert torch.equal(model(**inputs).logits, base.logits)


def test_an_image_encoder_with_fewer_keys_equals_the_oracle():
    config = transformers.PvtConfig(
        image_size=32, depths=4 * [1], hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2]
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.PvtModel(config).double().eval()
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    result = check("pvt", model, pixels, ("elu1", "softmax1"), cached=False)
    assert result.status == "right", f"{result.reason} {result.patches}"
    assert result.modules == (4, 4)


@pytest.mark.parametrize("family", properties.ADAPTED)
def test_layers_that_are_kept_or_bypassed_run_their_own_code(family):
    model = properties.model_of(family, torch.float32)
    spec, base = spec_of(family), logits(model)
    with as_oracle(model, spec, where=lambda module: module.layer_idx == 0):
        want = logits(model)
    patch_model(model, {0: spec})
    live = batch()["attention_mask"].bool()
    properties.close(logits(model)[live], want[live], 1e-4)
    patch_model(model, spec)
    with bypassed(model):
        assert torch.equal(logits(model), base)


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_copies_are_models_of_their_own(family):
    model = properties.model_of(family, torch.float32)
    base = logits(model)
    want = logits(patch_model(model, spec_of(family)))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in copies:
        assert torch.equal(logits(other), want)
        assert torch.equal(logits(unpatch_model(other)), base)


def test_hooks_of_offloading_stay_whenever_they_came():
    hooks = pytest.importorskip("accelerate.hooks")
    model = properties.model_of("gptj", torch.float32)
    attention = model.transformer.h[0].attn
    base, calls = logits(model), []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    with patched(model, "elu1"):
        want = logits(model)
        hooks.add_hook_to_module(attention, Hook())
        assert torch.equal(logits(model), want)
    assert torch.equal(logits(model), base)
    with patched(model, "elu1"):
        assert torch.equal(logits(model), want)
    assert len(calls) == 3
    hooks.remove_hook_from_module(attention)
    assert "forward" not in attention.__dict__ or attention.forward.__func__ is type(attention).forward


@pytest.mark.parametrize("family", ["falcon", "falcon, alibi", "gptj", "mpt", "gpt_neo"])
def test_generation_is_greedy_continuation(family):
    model = patch_model(properties.model_of(family, torch.float32), spec_of(family))
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 20), 5)
    want = tiny_models.grow(model, ids, 6, mask)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ALIBI)
def test_alibi_is_handed_on_as_a_distance(family):
    model = properties.model_of(family)
    seen = []

    def watch(module, args):
        seen.append((args[3].shape[2], args[8]["position_bias"]))

    patch_model(model, "softmax1")
    for module in model.modules():
        if "linattn" in module._modules:
            module.linattn.register_forward_pre_hook(watch)
    whole = batch()["attention_mask"]
    model(**{key: batch()[key] for key in ("input_ids", "attention_mask")}, use_cache=False)
    rank = whole.cumsum(1) - 1
    scale = 8**-0.5 if family == "falcon, alibi" else 1.0
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    want = scale * slopes[:, None, None] * (rank[:, None, None] - rank[:, None, :, None])
    for keys, bias in seen:
        live = (whole[:, :, None] * whole[:, None])[:, None].bool() & torch.ones(keys, keys).tril().bool()
        assert float((bias - want).masked_fill(~live, 0).abs().max()) < 1e-6


@pytest.mark.parametrize("family", ["falcon, alibi", "gpt_neo"])
def test_weights_of_an_unpatched_model_can_be_asked_for(family):
    model = properties.model_of(family, torch.float32)
    inputs = {key: batch()[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        want = model(**inputs, use_cache=False, output_attentions=True).attentions
        calls = []
        with watching(model, calls.append):
            model(**inputs, use_cache=False)
    live = inputs["attention_mask"].bool()
    if family == "gpt_neo":  # falcon's eager form, which gives weights, adds ALiBi twice
        for call, weights in zip(calls, want, strict=True):
            got, weights = (x.transpose(1, 2)[live] for x in (call.weights, weights))
            properties.close(got, weights, 1e-5)
    assert len(calls) == 2
    patch_model(model, {0: "softmax1"})
    with pytest.raises(UnsupportedModelError, match="patch all layers, or none"), watching(model, print):
        pass


def test_a_plain_model_is_left_alone():
    model = properties.model_of("falcon")
    patch_model(model, "softmax")
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(row.patch == "softmax" for row in describe(model))


def test_a_replaced_forward_is_not_adapted():
    model = properties.model_of("falcon")
    attention = model.transformer.h[0].self_attention
    attention.forward = lambda *args, **kwargs: (args[0], None)
    with pytest.warns(UserWarning, match=r"FalconAttention \(1\)"):
        patch_model(model, "elu1")
    assert [row.module for row in describe(model)] == ["transformer.h.1.self_attention"]
    assert "FalconAttention (1)" in str(describe(model))


def test_text_and_image_of_git_are_both_patched(monkeypatch):
    model = causal_model("git")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = [row.module for row in describe(patch_model(model, "softmax1"))]
    assert len([name for name in names if "image_encoder" in name]) == 2
    assert len([name for name in names if "image_encoder" not in name]) == 2
    unpatch_model(model)
    monkeypatch.delitem(ADAPTERS, "git.GitSelfAttention")
    with pytest.raises(UnsupportedModelError, match=r"text decoder has .*GitSelfAttention \(2\)"):
        patch_model(model, "softmax1")
    patch_model(model, {names[0]: "softmax1"})  # what is named is patched


@pytest.mark.filterwarnings("ignore:BigBirdPegasusModel. modules stay as they are")
@pytest.mark.parametrize("kind", ["original_full", "block_sparse"])  # which reads a short text in full too
@pytest.mark.parametrize("patch", ["elu1", "softmax1"])
def test_modules_out_of_reach_get_the_masks_that_they_got(kind, patch):
    config = transformers.BigBirdPegasusConfig(**tiny_models.ENCODER_DECODER_SIZES, attention_type=kind)
    torch.manual_seed(0)
    model = transformers.BigBirdPegasusModel(config).double().eval()
    for weights in model.parameters():
        torch.nn.init.normal_(weights, 0, 0.2) if weights.ndim > 1 else None
    plain, (ids, mask) = copy.deepcopy(model), tiny_models.left_padded(tiny_models.tokens(2, 12), 4)
    patch_model(model, patch)
    for given in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            want = plain(ids, **given).encoder_last_hidden_state
            got = model(ids, **given)
            assert torch.equal(got.encoder_last_hidden_state, want)
            with as_oracle(plain, patch):
                decoded = plain(ids, encoder_outputs=(want,), **given).last_hidden_state
            assert torch.allclose(got.last_hidden_state, decoded)


def test_bigbird_that_went_over_to_full_attention_comes_back_as_it_was_saved(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BigBirdConfig(vocab_size=128, **sizes)
    model = prepare(transformers.BigBirdModel(config), torch.float32)
    model(**batch())  # a short text
    assert model.config.attention_type == "block_sparse"
    patch_model(model, "elu1").save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(*(x(**batch()).last_hidden_state for x in (again, model)))
    assert unpatch_model(model).config.attention_type == "block_sparse"


def test_longformer_is_refused_with_the_reason():
    config = transformers.LongformerConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(UnsupportedModelError, match=r"LongformerSelfAttention \(1: a band of keys"):
        patch_model(transformers.LongformerModel(config), "softmax1")


def test_every_adapter_is_short_and_names_a_class():
    for path in Path(adapters.__file__).parent.glob("*.py"):
        assert path.stem == "base" or len(path.read_text().splitlines()) <= 80, path.name
    for key in ADAPTERS:
        folder, name = key.split(".")
        module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[name])
        assert getattr(module, name).forward, key
    assert adapters.adapter_of(torch.nn.Linear(1, 1)) is None
