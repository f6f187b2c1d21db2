"""A feature map of one's own: what is taken, what is refused, what is saved and what cannot be."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import learned_patches, tiny_models
from helpers.learned_patches import state
from helpers.linear_patches import tokens_of
from helpers.oracle import FORMULAS, as_oracle, formula, over_its_sum
from helpers.properties import ENCODERS, FAMILIES, close, is_kept, logits, model_of
from helpers.random_inputs import random_qkv, relative_error
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_linattn import describe, from_pretrained, patch_model, patched, unpatch_model
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.patches.linear import FUNCTIONS
from hf_linattn.registry import parse

IDS = tiny_models.tokens(2, 40)


def cubed(x):
    return x.relu() ** 3 + 0.1


class Two(nn.Module):
    """[softplus(W x + b), 1]: one feature more than there are dimensions."""

    def __init__(self, size=8):
        super().__init__()
        torch.manual_seed(4)
        self.map = nn.Linear(size, size)

    def forward(self, x):
        y = F.softplus(self.map(x))
        return torch.cat([y, torch.ones_like(y[..., :1])], -1)


def with_map(model=None, **options):
    return patch_model(tiny_models.llama(2) if model is None else model, "linear", options=options)


def maps(model):
    return [layer.self_attn.linattn.attention.maps for layer in model.model.layers]


@pytest.fixture
def quadratic():
    """The formula of `cubed` for queries and any map for keys that has as many features."""

    @formula("own_map", scores=False)
    def own_map(x):
        return over_its_sum(cubed(x.query) @ F.softplus(x.key).mT, x.visible) @ x.value

    yield
    del FORMULAS["own_map"]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_of_ones_own_in_every_family(family, quadratic):
    model = model_of(family)
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 70), 20)
    extra = {} if family in ENCODERS else {"where": lambda module: not is_kept(module)}
    with as_oracle(model, "own_map", **extra) as seen:
        want = logits(model, ids, mask)
    assert seen.calls
    patch_model(model, "linear", options={"query_map": cubed, "key_map": F.softplus})
    close(logits(model, ids, mask)[mask.bool()], want[mask.bool()], 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["elu1", "hedgehog", "softmax_features", "t2r"])
def test_a_patch_by_name_is_that_patch(name):
    want = patch_model(tiny_models.llama(2), name)(IDS).logits
    model = with_map(feature_map=name)
    assert tiny_models.distance(model(IDS).logits, want) < 1e-12
    both = with_map(query_map=name, key_map=name)
    assert tiny_models.distance(both(IDS).logits, want) < 1e-12


@torch.no_grad()
def test_functions_by_name_are_what_they_are_called():
    x = torch.linspace(-5, 5, 11)
    for name, want in (
        ("exp", x.exp()),
        ("identity", x),
        ("relu", x.clamp(min=0)),
        ("sigmoid", 1 / (1 + (-x).exp())),
        ("softplus", (1 + x.exp()).log()),
        ("square", x * x),
    ):
        assert torch.allclose(FUNCTIONS[name](x), want)
    assert set(FUNCTIONS) == {"exp", "identity", "relu", "sigmoid", "softplus", "square"}
    assert FUNCTIONS["exp"](torch.tensor(1e4)).isfinite()


@torch.no_grad()
def test_the_default_is_elu1():
    assert (
        tiny_models.distance(with_map()(IDS).logits, patch_model(tiny_models.llama(2), "elu1")(IDS).logits)
        < 1e-12
    )


@torch.no_grad()
def test_a_layer_in_front_starts_as_nothing_and_is_learned():
    model = with_map(front=True)
    assert (
        tiny_models.distance(model(IDS).logits, patch_model(tiny_models.llama(2), "elu1")(IDS).logits) < 1e-12
    )
    names = [name for name, _ in model.named_parameters() if "linattn" in name and "layers.0" in name]
    assert [name.split("linear.")[1] for name in names] == ["fronts.query_map", "fronts.key_map"]


@torch.no_grad()
@pytest.mark.parametrize("front", [False, True])
def test_beside_a_window_a_name_is_that_patch(front):
    """elu1 divides its query features by a factor, which must come back where a sum is shared."""
    window = {"size": 8}
    want = patch_model(tiny_models.llama(2), "window+elu1", options=window)(IDS).logits
    options = {"window": window, "linear": {"feature_map": "elu1", "front": front}}
    assert (
        tiny_models.distance(
            patch_model(tiny_models.llama(2), "window+linear", options=options)(IDS).logits, want
        )
        < 1e-12
    )


# -------------------------------------------------------------------------------------- modules of one's own


def test_every_layer_trains_a_copy_of_a_module():
    own = Two()
    before = copy.deepcopy(own.state_dict())
    model = with_map(feature_map=own).train()
    assert describe(model).rows[0].parameters == 8 * 8 + 8  # one for queries and keys
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS).logits.square().mean().backward()
    optimizer.step()
    first, second = (m["feature_map"].map.weight for m in maps(model))
    assert not torch.equal(first, second)
    assert not torch.equal(first, before["map.weight"].double())
    assert all(torch.equal(own.state_dict()[key], x) for key, x in before.items())


@torch.no_grad()
def test_weights_of_a_module_are_in_the_state_dict():
    model = with_map(query_map=Two(), key_map=Two())
    learned_keys = [key for key in model.state_dict() if ".linattn." in key]
    prefix = "model.layers.0.self_attn.linattn.linear.maps.query_map.map."
    assert learned_keys[:2] == [prefix + "weight", prefix + "bias"]
    assert len(learned_keys) == 8
    for key in learned_keys:
        model.state_dict()[key].normal_()
    other = with_map(query_map=Two(), key_map=Two())
    assert tiny_models.distance(other(IDS).logits, model(IDS).logits) > 1e-3
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS).logits, model(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module_runs_in_the_dtype_of_the_model(dtype):
    exact = with_map(feature_map=Two())(IDS).logits
    model = with_map(tiny_models.llama(2, dtype=dtype), feature_map=Two())
    assert maps(model)[0]["feature_map"].map.weight.dtype == dtype
    got = model(IDS).logits
    assert got.dtype == dtype
    assert float((got.double() - exact).norm() / exact.norm()) < (1e-5 if dtype == torch.float32 else 0.05)


@torch.no_grad()
def test_decoding_with_a_module_is_the_forward():
    model = with_map(feature_map=Two())
    want = tiny_models.grow(model, IDS, 8)
    got = model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, want)
    assert describe(model).rows[0].state_bytes == 8 * 2 * 9 * (8 + 1)


# ---------------------------------------------------------------------------------------------- over n


@torch.no_grad()
def test_over_n_takes_any_sign_and_is_linear_in_the_map():
    model = with_map(feature_map="identity", normalise="n")
    attention = model.model.layers[0].self_attn.linattn.attention
    twice = with_map(query_map=lambda x: -2 * x, key_map="identity", normalise="n")
    other = twice.model.layers[0].self_attn.linattn.attention
    tokens = tokens_of(*random_qkv((1, 4, 2, 90, 8, 8)))
    assert relative_error(other.causal(tokens, None)[0], -2 * attention.causal(tokens, None)[0]) < 1e-12


# ----------------------------------------------------------------------------------------------- refused

REFUSED = [
    ({"feature_map": "identity"}, r"feature_map gives negative features \(-.*normalise='n'"),
    ({"key_map": torch.tanh}, "key_map gives negative features"),
    ({"feature_map": "elu"}, r"'elu' is neither a function \(exp, .*nor a linear patch.*elu1"),
    ({"feature_map": "softmax1"}, "nor a linear patch"),
    ({"feature_map": "decay"}, "nor a linear patch"),
    ({"feature_map": "linear"}, "nor a linear patch"),
    (
        {"feature_map": "taylor2"},
        "feature_map gives negative features",
    ),  # its weights are not, but who can tell
    ({"feature_map": nn.ReLU}, "feature_map is the class ReLU: give an object of it"),
    ({"feature_map": nn.Linear(5, 5)}, r"feature_map fails on \[3, 4, 16, 8\]"),
    ({"key_map": lambda x: x.sum()}, r"key_map must make .*\[3, 2, 16, 8\] became \[\]"),
    ({"key_map": lambda x: (x, x)}, "became tuple"),
    ({"query_map": Two()}, "query_map makes 9 features and key_map 8"),
    ({"feature_map": lambda x: 1 / x.relu()}, "not finite"),
    ({"feature_map": 3}, "option 'feature_map' of 'linear' must be"),
    ({"feature_map": None}, "option 'feature_map' of 'linear' must be"),
    ({"feature_map": ["relu"]}, "option 'feature_map' of 'linear' must be"),
    ({"normalise": "mean"}, "option 'normalise' of 'linear' must be"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_no_map_is_refused_and_changes_nothing(options, message):
    model = tiny_models.llama(2)
    before = state(model)
    with pytest.raises(OptionError, match=message):
        with_map(model, **options)
    assert state(model) == before


def test_other_options_take_no_functions():
    with pytest.raises(OptionError, match="option 'power' of 'cosine' must be float"):
        parse("cosine", {"power": abs})
    with pytest.raises(OptionError, match="normalise"):
        parse("linear", {"normalise": len})


def test_no_values_are_looked_at_on_the_meta_device():
    def never(x):
        raise AssertionError("tried out on the meta device")

    config = LlamaConfig(**{**tiny_models.SIZES, "num_hidden_layers": 1})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        patch_model(model, "linear", options={"feature_map": never})
        assert describe(model).rows[0].state_bytes is None
        patch_model(model, "linear", options={"feature_map": "hedgehog"})
        assert describe(model).rows[0].state_bytes == 4 * 2 * 16 * 9
        patch_model(model, "linear", options={"query_map": "relu", "key_map": "elu1"})
        assert describe(model).rows[0].state_bytes == 4 * 2 * 8 * 9


# ----------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize(
    "options",
    [{"feature_map": "softplus"}, {"query_map": "t2r", "key_map": "relu"}, {"feature_map": "hedgehog"}],
    ids=str,
)
def test_names_are_saved_and_come_back(options, tmp_path):
    model = with_map(tiny_models.llama(2, dtype=torch.float32), **options)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if ".linattn." in key:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(learned_patches.logits(loaded, IDS), learned_patches.logits(model, IDS))
    assert describe(loaded).rows[0].options == {"linear": options}
    assert [row.state_bytes for row in describe(loaded)] == [row.state_bytes for row in describe(model)]


@pytest.mark.parametrize(
    "given", [cubed, lambda x: x.exp(), Two(), nn.Sequential(nn.Linear(8, 4), nn.ReLU())]
)
def test_functions_and_modules_are_not_saved_and_nothing_is_written(given, tmp_path):
    model = with_map(feature_map=given)
    folder = tmp_path / "model"
    for saved in (model, model.model):
        with pytest.raises(
            CheckpointError, match=r"nothing was saved.*linear.feature_map \(.*register a patch"
        ):
            saved.save_pretrained(folder)
        with pytest.raises(CheckpointError, match="nothing was saved"):
            saved.push_to_hub(str(folder))
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError):
        copy.deepcopy(model).save_pretrained(folder)


def test_one_layer_with_a_function_is_enough():
    model = patch_model(tiny_models.llama(2), {"0": "elu1", "1": ("linear", {"feature_map": cubed})})
    with pytest.raises(CheckpointError, match=r"linear.feature_map \(.*cubed\)"):
        model.save_pretrained("nowhere")


def test_a_config_saved_by_itself_does_not_load(tmp_path):
    model = with_map(tiny_models.llama(2, dtype=torch.float32), feature_map=cubed)
    model.config.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["linattn"]
    assert entry["patches"][0]["options"] == {"linear": {"feature_map": f"{__name__}.cubed"}}
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="neither a function"):
        from_pretrained(tmp_path, auto_class=AutoModelForCausalLM)


def test_unpatch_leaves_no_trace_and_saves_again(tmp_path):
    model = tiny_models.llama(2, dtype=torch.float32)
    before = state(model)
    want = learned_patches.logits(model, IDS)
    with_map(model, feature_map=Two())
    assert "save_pretrained" in model.__dict__
    twin = copy.deepcopy(model)
    unpatch_model(model)
    assert state(model) == before
    assert "save_pretrained" in twin.__dict__
    unpatch_model(twin)
    for each in (model, twin):
        assert torch.equal(learned_patches.logits(each, IDS), want)
        assert "save_pretrained" not in each.model.__dict__
        each.save_pretrained(tmp_path)
    with_map(model, feature_map=cubed)
    patch_model(model, "elu1")  # another patch in its place can be saved
    model.save_pretrained(tmp_path / "elu1")
    assert from_pretrained(tmp_path / "elu1") is not None


def test_a_save_pretrained_of_the_users_own_comes_back():
    model = tiny_models.llama(1)
    model.save_pretrained = own = print
    with patched(model, "linear", options={"feature_map": cubed}), pytest.raises(CheckpointError):
        model.save_pretrained("nowhere")
    assert model.save_pretrained is own


def test_description_names_what_it_cannot_show():
    shown = str(describe(with_map(query_map=Two(), key_map=Two())))
    assert f"query_map={__name__}.Two key_map={__name__}.Two" in shown


def test_a_patched_model_can_be_pickled_whole():
    model = with_map(query_map=cubed, key_map="softplus")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(learned_patches.logits(again, IDS), learned_patches.logits(model, IDS))
