"""Bad calls end in one clear error, and leave the model exactly as it was, patched or not."""

import pytest
import torch
from helpers import learned_patches, tiny_models
from helpers.learned_patches import logits, state
from torch import nn
from transformers import LiltConfig, LiltModel

from hf_linattn import describe, is_patched, patch_model, patched, register, unpatch_model
from hf_linattn.attention import LinearAttention
from hf_linattn.errors import (
    LinattnError,
    NotPatchedError,
    OptionError,
    PlanError,
    RegistrationError,
    UnknownPatchError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from hf_linattn.patches.elu1 import Elu1

IDS = tiny_models.tokens(2, 20)
LOGN = "softmax1+logn"
CALLS = [
    (("elu11",), {}, UnknownPatchError, "unknown patch 'elu11'. Did you mean 'elu1'"),
    (("ELU1",), {}, UnknownPatchError, "unknown patch 'ELU1'. Did you mean 'elu1'"),
    (("",), {}, OptionError, "lacks the name"),
    (("+",), {}, OptionError, "lacks the name"),
    (("elu1+",), {}, OptionError, "lacks the name"),
    (("elu1+softmax1",), {}, OptionError, "holds 2 attentions"),
    (("logn + logn",), {}, OptionError, "twice"),
    ((None,), {}, PlanError, "a name, a dict or a callable|got None"),
    ((lambda name: "elu1",), {}, PlanError, r"must take \(name, module\)"),
    ((lambda: "elu1",), {}, PlanError, r"must take \(name, module\)"),
    ((["elu1"],), {}, PlanError, "got .'elu1'"),
    ((Elu1,), {}, PlanError, "got <class"),
    (({},), {}, PlanError, "the plan is empty"),
    (({9: "elu1"},), {}, PlanError, "key 9 matches no attention module; there are model.layers.0.self_attn"),
    (({-1: "elu1"},), {}, PlanError, "matches no"),
    (({(0, 9): "elu1"},), {}, PlanError, "matches no"),
    (({"0,9": "elu1"},), {}, PlanError, "matches no"),
    (({"1-0": "elu1"},), {}, PlanError, "matches no"),
    (({"0,1-2": "elu1"},), {}, PlanError, "key '0,1-2' reaches to layer 2; there are 2 layers, from 0 on"),
    (({"mlp": "elu1"},), {}, PlanError, "matches no"),
    (({(): "elu1"},), {}, PlanError, "matches no"),
    (({True: "elu1"},), {}, PlanError, "got True"),
    (({1.0: "elu1"},), {}, PlanError, "got 1.0"),
    (({None: "elu1"},), {}, PlanError, "got None"),
    (({" ": "elu1"},), {}, PlanError, "got ' '"),
    (
        ({0: "elu1", "0-1": "softmax1"},),
        {},
        PlanError,
        "keys 0 and '0-1' overlap at model.layers.0.self_attn",
    ),
    (({0: "elu1", 1: None},), {}, OptionError, "named by a string"),
    (({0: ("elu1", 3)},), {}, OptionError, "named by a string"),
    (({0: "elu1", 1: ("logn", {"base": 2})},), {}, OptionError, "'logn' has no option 'base'"),
    ((lambda name, module: None,), {}, PlanError, "chose no attention module"),
    ((lambda name, module: 3,), {}, OptionError, "named by a string"),
    ((lambda name, module: "logm",), {}, UnknownPatchError, "Did you mean 'logn'"),
    (("elu1",), {"options": []}, OptionError, "must be a dict, got"),
    (("elu1",), {"options": {"train_length": 512}}, OptionError, "'elu1' has no option 'train_length'"),
    (("elu1",), {"options": {"elu1": {"x": 1}}}, OptionError, "takes no options"),
    (("elu1",), {"options": {1: 2}}, OptionError, "no option 1"),
    (({0: "elu1"},), {"options": {"kappa": 1.0}}, OptionError, "no patch of the plan has an option 'kappa'"),
    ((LOGN,), {"options": {"trainlength": 3}}, OptionError, "Did you mean 'train_length'"),
    ((LOGN,), {"options": {"train_length": True}}, OptionError, "must be .*int.*got True"),
    ((LOGN,), {"options": {"train_length": 5.0}}, OptionError, "got 5.0"),
    ((LOGN,), {"options": {"train_length": "all"}}, OptionError, "'config'"),
    ((LOGN,), {"options": {"train_length": 1}}, OptionError, "at least 2 tokens, got 1"),
    ((LOGN,), {"options": {"train_length": -4}}, OptionError, "at least 2 tokens, got -4"),
    ((LOGN,), {"options": {"kappa": 0}}, OptionError, 'positive number or "learned", got 0'),
    ((LOGN,), {"options": {"kappa": float("nan")}}, OptionError, 'positive number or "learned", got nan'),
    ((LOGN,), {"options": {"kappa": "1"}}, OptionError, r"must be float, 'learned' or None"),
    ((LOGN,), {"options": {"kappa": 1.0, "train_length": 9}}, OptionError, "give one of them"),
    ((LOGN,), {"options": {"clip": 1}}, OptionError, "must be bool, got 1"),
    ((LOGN,), {"options": {"logn": {"clip": True}, "clip": True}}, OptionError, "given twice"),
    (("elu1",), {"sliding": "drop"}, OptionError, "sliding must be"),
    (("elu1",), {"sliding": None}, OptionError, "sliding must be"),
    (
        ({0: "elu1", 1: "built_badly"},),
        {},
        OptionError,
        "cannot be built for model.layers.1.self_attn .*: no luck",
    ),
    (
        ({0: "elu1", 1: "keeps_a_tensor"},),
        {},
        RegistrationError,
        "keeps_a_tensor.table is a tensor that is not saved",
    ),
    (({0: "elu1", 1: "forward"},), {}, RegistrationError, "no patch can be called 'forward'"),
]


class BuiltBadly(LinearAttention):
    """Fails for the second layer, when the first is built."""

    def __init__(self, site):
        raise ValueError("no luck")


class KeepsATensor(Elu1):
    """Would be empty after loading."""

    def __init__(self, site):
        super().__init__(site)
        self.register_buffer("table", torch.ones(2), persistent=False)


class Forward(Elu1):
    """A name that the child module needs itself."""


@pytest.fixture(autouse=True)
def bad_patches():
    with (
        learned_patches.registered(BuiltBadly, "built_badly"),
        learned_patches.registered(KeepsATensor, "keeps_a_tensor"),
        learned_patches.registered(Forward, "forward"),
    ):
        yield


@pytest.mark.parametrize("old", [None, {0: "elu1"}], ids=["unpatched", "patched"])
def test_bad_calls_change_nothing(old):
    model = tiny_models.llama(2)
    plain = state(model)
    if old is not None:
        patch_model(model, old)
    before, want, table = state(model), logits(model, IDS), str(describe(model))
    for args, options, error, match in CALLS:
        with pytest.raises(error, match=match) as caught:
            patch_model(model, *args, **options)
        assert isinstance(caught.value, LinattnError), args
        assert state(model) == before, args
        assert str(describe(model)) == table, args
    assert torch.equal(logits(model, IDS), want)
    if old is not None:
        model.generate(IDS, max_new_tokens=2, do_sample=False)
        unpatch_model(model)
    assert state(model) == plain


def test_layers_that_cannot_be_kept():
    model = tiny_models.llama(2)
    model.set_attn_implementation("flex_attention")
    before = state(model)
    with pytest.raises(
        UnsupportedModelError, match=r"model.layers.1.self_attn keeps its own attention, 'flex"
    ):
        patch_model(model, {0: "elu1"})
    assert state(model) == before
    patch_model(model, "elu1")
    with pytest.raises(
        UnsupportedModelError, match=r"model.layers.1.self_attn keeps its own attention, 'flex"
    ):
        patch_model(model, {0: "elu1"})
    assert [row.patch for row in describe(model)] == ["elu1", "elu1"]


NO_MODELS = [None, 3, "gpt2", nn.Linear(2, 2), Elu1]


@pytest.mark.parametrize("function", [patch_model, unpatch_model, describe, is_patched])
@pytest.mark.parametrize("model", NO_MODELS, ids=lambda model: str(model)[:20])
def test_what_is_no_model(function, model):
    with pytest.raises(UnsupportedModelError, match="expected a transformers model"):
        function(model)
    with pytest.raises(UnsupportedModelError, match="expected a transformers model"), patched(model):
        pass


def test_parts_and_wholes():
    model = tiny_models.llama(2)
    before = state(model)
    two = nn.ModuleList([model, tiny_models.llama(2)])
    with pytest.raises(UnsupportedModelError, match="ModuleList holds LlamaForCausalLM, LlamaForCausalLM"):
        patch_model(two)
    with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer holds none"):
        patch_model(model.model.layers[0])
    patch_model(model.model, "softmax1")
    with pytest.raises(UnsupportedModelError, match="'model' of this model is patched by itself"):
        patch_model(model)
    unpatch_model(model.model)
    assert state(model) == before
    patch_model(model)
    with pytest.raises(UnsupportedModelError, match="LlamaModel is a part of a patched model"):
        patch_model(model.model)
    with pytest.raises(NotPatchedError, match="LlamaModel is not patched"):
        unpatch_model(model.model)
    unpatch_model(model)
    assert state(model) == before


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("kind", ["peft", "compile", "module", "parallel"])
def test_wrappers_pass_the_call_on(kind):
    model = tiny_models.llama(2, dtype=torch.float32)
    want = logits(patch_model(tiny_models.llama(2, dtype=torch.float32)), IDS)
    if kind == "peft":
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    else:
        wrap = {"compile": lambda m: torch.compile(m, backend="eager"), "module": Wrapper}
        wrapped = {**wrap, "parallel": nn.DataParallel}[kind](model)
    assert patch_model(wrapped) is wrapped
    assert is_patched(wrapped)
    assert is_patched(model)
    assert len(describe(wrapped)) == 2
    assert tiny_models.distance(logits(model, IDS), want) < 1e-5
    if kind == "peft":
        assert wrapped.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (2, 22)
    assert unpatch_model(wrapped) is wrapped
    assert not is_patched(model)


@pytest.mark.parametrize(
    ("patch", "part"), [("hedgehog", "hedgehog.query_weight"), ("window+gated", "window.rest.weight")]
)
def test_a_wrapper_does_not_take_the_place_of_a_patch(patch, part):
    peft = pytest.importorskip("peft")
    model = patch_model(tiny_models.llama(2, dtype=torch.float32), patch)
    want, name = logits(model, IDS), f"model.layers.0.self_attn.linattn.{part}"
    assert name in dict(model.named_parameters())
    with pytest.raises(UnsupportedModelError, match=r"cannot be replaced by a ParamWrapper.*modules_to_save"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=[], r=2, target_parameters=[name]))
    assert torch.equal(logits(model, IDS), want)


@pytest.mark.parametrize("spec", ["elu1", "gated", "window", "h2o"])
def test_a_model_without_memory_tells_shapes(spec):
    with torch.device("meta"):
        model = patch_model(tiny_models.llama(2), spec)
        assert model(torch.zeros(2, 20, dtype=torch.long)).logits.shape[:2] == (2, 20)


def test_meta_and_offloaded_models(tmp_path):
    with torch.device("meta"):
        model = tiny_models.llama(2)
    with learned_patches.registered():
        patch_model(model, learned_patches.NAME)
        assert model.model.layers[0].self_attn.linattn.learned_map.map.weight.is_meta
        from hf_linattn import from_pretrained

        tiny_models.llama(2, dtype=torch.float32).save_pretrained(tmp_path / "saved")
        places = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        places |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
        off = from_pretrained(tmp_path / "saved", device_map=places, offload_folder=tmp_path / "off")
        for spec in (learned_patches.NAME, "performer", "lsh"):  # these draw buffers
            with pytest.raises(UnsupportedModelError, match=r"model.layers.0.self_attn is offloaded"):
                patch_model(off, spec)
        want = logits(patch_model(tiny_models.llama(2, dtype=torch.float32), "elu1"), IDS)
        assert torch.equal(logits(patch_model(off, "elu1"), IDS), want)


@pytest.mark.parametrize("spec", ["elu1", "softmax1", "window"])
def test_keys_and_values_of_different_heads_are_refused(spec):
    """As Nemotron 3's sounds have them in a config with grouped keys; torch's fused softmax takes both."""
    model = tiny_models.llama(1)
    model.model.layers[0].self_attn.v_proj = nn.Linear(32, 32, bias=False).double()
    want = logits(model, IDS)
    patch_model(model, spec)
    with pytest.raises(UnsupportedCallError, match="keys have 2 heads and values 4"):
        logits(model, IDS)
    assert torch.equal(logits(unpatch_model(model), IDS), want)


def test_attention_by_a_softmax_module_is_named():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 97}
    model = LiltModel(LiltConfig(num_hidden_layers=1, **sizes))
    with pytest.raises(UnsupportedModelError, match=r"no adapter knows LiltSelfAttention \(1\)"):
        patch_model(model, "elu1")


def test_registration():
    with pytest.raises(RegistrationError, match="two patches want the name 'elu1'"):
        register("elu1")(BuiltBadly)
    with pytest.raises(RegistrationError, match="derived from one of Attention"):
        register("number")(int)
    for name in (Elu1, "", "a+b", "a.b", "a b", "_"):
        with pytest.raises(RegistrationError, match="letters, digits"):
            register(name)
    assert register("elu1")(Elu1) is Elu1
