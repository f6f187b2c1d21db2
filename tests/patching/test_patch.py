"""patch_model and what undoes it: plans, windows, copies of configs, and that nothing is left behind."""

import contextlib
import itertools

import pytest
import torch
from helpers import learned_patches, oracle, tiny_models
from helpers.learned_patches import logits, state
from helpers.oracle import as_oracle

from hf_linattn import describe, is_linear, is_patched, patch_model, patched, unpatch_model
from hf_linattn.errors import NotPatchedError, PlanError, UnsupportedModelError

IDS = tiny_models.tokens(2, 40)


def shown(value):
    """A name for a case: the same in every process, also for functions."""
    return "callable" if callable(value) else str(value)


@pytest.mark.parametrize(
    "patch",
    [
        "softmax",
        "softmax1",
        "logn",
        "softmax1+logn",
        "elu1",
        "efficient",
        "alibi",
        {"0": "elu1", "1": "logn"},
    ],
    ids=shown,
)
def test_unpatch_leaves_nothing(patch):
    model = tiny_models.llama(2)
    want, before = logits(model, IDS), state(model)
    assert patch_model(model, patch) is model
    assert is_patched(model)
    got = logits(model, IDS)
    assert torch.equal(got, want) == (patch == "softmax")
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert unpatch_model(model) is model
    assert not is_patched(model)
    assert state(model) == before
    assert torch.equal(logits(model, IDS), want)
    with pytest.raises(NotPatchedError, match="not patched"):
        unpatch_model(model)


def test_changes_of_the_config_survive():
    model = tiny_models.llama(2)
    config, before = model.config, model.config.to_dict()
    patch_model(model, "elu1")
    assert model.config is not config
    assert config.to_dict() == before  # whoever shares it sees nothing
    model.config.use_cache = False
    model.config.note = "mine"
    del model.config.bos_token_id
    unpatch_model(model)
    assert model.config is config
    assert (config.use_cache, config.note) == (False, "mine")
    assert "bos_token_id" not in config.__dict__


def test_context_manager():
    model = tiny_models.llama(2)
    want, before = logits(model, IDS), state(model)
    with pytest.raises(KeyError), patched(model, "softmax1+logn", options={"train_length": 64}) as inside:  # noqa: PT012
        assert inside is model
        assert tiny_models.distance(logits(model, IDS), want) > 1e-3
        with pytest.raises(NotPatchedError, match="unpatched model"), patched(model):
            pass
        raise KeyError
    assert state(model) == before
    with patched(model):
        unpatch_model(model)
    assert state(model) == before


PLANS = [
    ({1: "elu1", 2: "elu1"}, [1, 2]),
    ({"1-2": "elu1"}, [1, 2]),
    ({"0, 2": "elu1"}, [0, 2]),
    ({(0, 2): "elu1"}, [0, 2]),
    ({range(1, 3): "elu1"}, [1, 2]),
    ({"model.layers.1.*": "elu1"}, [1]),
    ({"layers.1.self_attn": "elu1"}, [1]),
    ({"*self_attn": " elu1 "}, [0, 1, 2]),
    ({"model.layers.1": ("elu1", {})}, [1]),
    ({"0": "softmax", "1-2": "elu1"}, [1, 2]),
    (lambda name, module: "elu1" if module.layer_idx else None, [1, 2]),
    (lambda name, module: ["elu1", {}] if name.endswith("0.self_attn") else "softmax", [0]),
]


@pytest.mark.parametrize(("plan", "layers"), PLANS, ids=shown)
def test_plans(plan, layers):
    model = tiny_models.llama(3)
    with as_oracle(model, "elu1", where=lambda module: module.layer_idx in layers):
        want = logits(model, IDS)
    patch_model(model, plan)
    assert [row.layer for row in describe(model) if row.patch == "elu1"] == layers
    assert tiny_models.distance(logits(model, IDS), want) < 1e-6


def test_numpy_indices():
    numpy = pytest.importorskip("numpy")
    model = patch_model(tiny_models.llama(2), {numpy.int64(1): "elu1"})
    assert [row.patch for row in describe(model)] == ["softmax", "elu1"]


OPTIONS = [
    ("softmax1+logn", {"train_length": 64}, {"train_length": 64}),
    ("logn+softmax1", {"logn": {"train_length": 64}}, {"train_length": 64}),
    ("softmax1+logn", {"train_length": "config"}, {"train_length": 256}),
    ("softmax1+logn", {"kappa": 1}, {"kappa": 1.0}),
    ("softmax1+logn", {"clip": True, "train_length": 20}, {"clip": True, "train_length": 20}),
    ({"*": "softmax1+logn"}, {"train_length": 64}, {"train_length": 64}),
    ({"*": ("softmax1+logn", {"train_length": 64})}, {"clip": True}, {"train_length": 64, "clip": True}),
    (lambda name, module: ("softmax1+logn", {"train_length": 64}), None, {"train_length": 64}),
]


@pytest.mark.parametrize(("patch", "options", "want"), OPTIONS, ids=shown)
def test_options(patch, options, want):
    model = tiny_models.llama(2)
    with as_oracle(model, "softmax1+logn", **want):
        want = logits(model, IDS)
    patch_model(model, patch, options=options)
    assert tiny_models.distance(logits(model, IDS), want) < 1e-6


def test_shared_options_go_to_those_who_take_them():
    model = patch_model(tiny_models.llama(2), {0: "elu1", 1: "softmax1+logn"}, options={"train_length": 64})
    assert [row.options for row in describe(model)] == [{}, {"logn": {"train_length": 64}}]


def test_describe():
    plan = {"0": "softmax1+logn", "1": learned_patches.NAME}
    with learned_patches.registered():
        model = patch_model(tiny_models.llama(3, dtype=torch.float32), plan, options={"kappa": 0.5})
        first, second, third = table = describe(model)
    assert (first.patch, first.linear, first.options) == ("softmax1+logn", False, {"logn": {"kappa": 0.5}})
    assert (second.linear, second.parameters) == (True, 8 * 8 + 8)
    assert second.state_bytes == 4 * 2 * 8 * 9  # float32, key heads, features, values and normaliser
    assert (third.patch, third.bytes_per_token, third.state_bytes) == ("softmax", 2 * 2 * 8 * 4, None)
    assert (table.parameters, table.state_bytes) == (72, 576)
    lines = str(table).splitlines()
    assert lines[0] == "LlamaForCausalLM"
    assert "kappa=0.5" in lines[2]
    assert "O(n)" in lines[3]
    assert "576 B" in lines[3]
    assert not is_linear(model)
    assert is_linear(patch_model(model, "elu1"))
    assert describe(tiny_models.llama(2, dtype=torch.bfloat16)).rows[0].bytes_per_token == 2 * 2 * 8 * 2


def test_a_new_patch_replaces_the_old():
    model = tiny_models.llama(2)
    before = state(model)
    want = logits(patch_model(tiny_models.llama(2), "softmax1"), IDS)
    patch_model(model, {"0": "elu1"})
    patch_model(model, "softmax1")
    assert torch.equal(logits(model, IDS), want)
    patch_model(model, "softmax")
    unpatch_model(model)
    assert state(model) == before


@pytest.mark.parametrize("patch", ["gated", "hedgehog", "performer"])
def test_patched_in_inference_mode_a_model_trains_all_the_same(patch):
    model = tiny_models.llama(1)
    with torch.inference_mode():
        patch_model(model, patch)
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_two_models_with_one_config_do_not_meet():
    first, second, third = tiny_models.llama(2), tiny_models.llama(2, seed=1), tiny_models.llama(2, seed=2)
    for model in (second, third):
        for module in model.modules():
            if "config" in module.__dict__:
                module.config = first.config
    plain = [logits(model, IDS) for model in (first, second, third)]
    patch_model(first, "elu1")
    patch_model(second, "softmax1")
    with as_oracle(third, "softmax"):
        assert tiny_models.distance(logits(third, IDS), plain[2]) < 1e-6
    assert torch.equal(logits(third, IDS), plain[2])
    assert [
        tiny_models.distance(logits(m, IDS), p) > 1e-2 for m, p in zip((first, second), plain, strict=False)
    ] == [True] * 2
    unpatch_model(first)
    assert torch.equal(logits(first, IDS), plain[0])
    unpatch_model(second)
    assert second.config is first.config


def mistral():
    return tiny_models.build(
        "MistralForCausalLM", num_hidden_layers=3, sliding_window=16, **tiny_models.SIZES
    )


@contextlib.contextmanager
def windows_in(layers):
    """While the oracle runs: the window is cut out of the mask of other layers than these."""
    visible = oracle.visible_keys

    def causal(module, query, key, mask, is_causal):
        if module.layer_idx not in layers:
            mask = mask.any(-2, keepdim=True) & torch.ones_like(mask).tril()
        return visible(module, query, key, mask, is_causal)

    oracle.visible_keys = causal
    try:
        yield
    finally:
        oracle.visible_keys = visible


def in_pieces(model, ids, mask, cuts=(0, 9, 30, 31, 32, 40)):
    cache, out = None, []
    for first, last in itertools.pairwise(cuts):
        given = {"attention_mask": mask[:, :last], "position_ids": tiny_models.positions(mask)[:, first:last]}
        with torch.no_grad():
            step = model(ids[:, first:last], past_key_values=cache, use_cache=True, **given)
        cache = step.past_key_values
        out.append(step.logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    "plan", [{"0": "elu1"}, {"1": "logn"}, {"2": "softmax1"}, "elu1", "softmax1"], ids=shown
)
def test_windows_dropped_in_all_layers_or_some(plan, padding):
    ids, mask = tiny_models.left_padded(IDS, padding)
    live = mask.bool()
    given = {"attention_mask": mask, "position_ids": tiny_models.positions(mask)}
    model = mistral()
    dropped = [0, 1, 2] if isinstance(plan, str) else [int(layer) for layer in plan]
    kept = [layer for layer in range(3) if layer not in dropped]
    patch_model(model, plan, sliding="global")
    assert [row.note for row in describe(model)] == [
        "" if n in kept else "sliding window dropped" for n in range(3)
    ]
    assert [row.window for row in describe(model)] == ["sliding" if n in kept else None for n in range(3)]
    with torch.no_grad():
        whole = model(ids, use_cache=False, **given).logits
    assert tiny_models.distance(in_pieces(model, ids, mask)[live], whole[live]) < 1e-6
    unpatch_model(model)
    patch = plan if isinstance(plan, str) else next(iter(plan.values()))
    with windows_in(kept), as_oracle(model, patch, where=lambda m: m.layer_idx in dropped), torch.no_grad():
        want = model(ids, use_cache=False, **given).logits
    assert tiny_models.distance(whole[live], want[live]) < 1e-6


def test_windows_kept_and_refused():
    model = mistral()
    want = logits(model, IDS)
    with pytest.raises(PlanError, match="sliding='global'"):
        patch_model(model, "elu1")
    with pytest.raises(UnsupportedModelError, match="sliding='refuse'"):
        patch_model(model, "elu1", sliding="refuse")
    with as_oracle(model, "softmax1"):
        windowed = logits(model, IDS)
    assert tiny_models.distance(logits(patch_model(model, "softmax1"), IDS), windowed) < 1e-6
    assert [row.window for row in describe(model)] == ["sliding"] * 3
    unpatch_model(model)
    assert torch.equal(logits(model, IDS), want)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    hybrid = tiny_models.build(
        "Gemma3ForCausalLM", num_hidden_layers=3, sliding_window=16, layer_types=types, **tiny_models.SIZES
    )
    with as_oracle(hybrid, "elu1", where=lambda module: module.layer_idx == 1):
        want = logits(hybrid, IDS)
    assert tiny_models.distance(logits(patch_model(hybrid, "elu1"), IDS), want) < 1e-5
    assert [row.note for row in describe(hybrid)] == ["sliding window kept", "", "sliding window kept"]
    assert is_linear(hybrid)
