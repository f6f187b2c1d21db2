"""Which layers stay softmax: arrangements against models built by hand, scores, plans, refusals."""

import json

import pytest
import torch
from helpers import tiny_models
from helpers.fixtures_layers import LENGTH, learned, original, recall_of, stack, tokenizer_of
from helpers.fixtures_perplexity import TEXTS

from hf_linattn import bypassed, describe, patch_model
from hf_linattn.errors import (
    CheckpointError,
    DataError,
    NotPatchedError,
    OptionError,
    PlanError,
    UnsupportedModelError,
)
from hf_linattn.eval.common.windows import encode, plan_windows
from hf_linattn.eval.layers import Recall, plan_for, plan_of, rank_layers
from hf_linattn.eval.layers.measure import Evaluator
from hf_linattn.eval.layers.model import OWN, Layer, check_original, layers_of, put, sliding_of
from hf_linattn.eval.layers.ranking import recall_over_perplexity, state_bytes
from hf_linattn.eval.perplexity.measure import measure

COSTS = (0.0, 0.3, 0.1, 0.0)
"""Recall that a linear layer costs, in the tests that ask for recall."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def model():
    return learned(original())


@pytest.fixture
def fake(monkeypatch):
    def install(costs=COSTS, best=0.9, calls=None):
        monkeypatch.setattr("hf_linattn.eval.recall.measure_recall", recall_of(costs, best, calls))

    return install


def evaluator_of(model, tokenizer, **options):
    plan = plan_windows(encode(tokenizer, TEXTS), [LENGTH], stride="full", max_tokens=6 * LENGTH)
    return Evaluator(model, tokenizer, layers_of(model), plan, None, **options)


def ranked(model, tokenizer, **options):
    return rank_layers(model, tokenizer, TEXTS, length=LENGTH, max_tokens=3 * LENGTH, batch_size=3, **options)


def by_hand(model, plan):
    """A second model with this plan and the maps of the first."""
    other = patch_model(original(dtype=next(model.parameters()).dtype), plan)
    maps = {name: x for name, x in model.state_dict().items() if name in other.state_dict()}
    missing, _ = other.load_state_dict(maps, strict=False)
    assert not missing
    return other


# ------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    ("own", "kept", "plan"),
    [
        ((0, 2, 3), (OWN, {}), {"1": "hedgehog"}),
        ((1,), (OWN, {}), {"0,2-3": "hedgehog"}),
        ((), (OWN, {}), "hedgehog"),
        ((1, 3), ("nope", {}), {"0,2": "hedgehog", "1,3": "nope"}),
        (
            (0, 1, 2, 3),
            ("nope+logn", {"logn": {"train_length": 32}}),
            {"0-3": ("nope+logn", {"train_length": 32})},
        ),
    ],
)
@torch.no_grad()
def test_an_arrangement_is_the_model_built_by_hand(model, tokenizer, own, kept, plan):
    evaluator = evaluator_of(model, tokenizer)
    before, children = (
        model(tiny_models.tokens(1, 40)).logits,
        [m.self_attn.linattn for m in model.model.layers],
    )
    row = evaluator.measure(own, kept, recall=False)
    other = by_hand(model, plan)
    (want,) = measure(other, tokenizer, TEXTS, [LENGTH], stride="full", max_tokens=6 * LENGTH)
    assert row.nats == pytest.approx(want.nats, abs=1e-5)
    assert row.stderr == pytest.approx(want.stderr, rel=1e-3)
    assert row.tokens == want.tokens
    total = 0.0
    for window in evaluator.plan.windows(LENGTH):
        ids = evaluator.plan.texts.documents[window.document].ids[None, window.start : window.end]
        p, q = (m(ids).logits[0, :-1].double().softmax(-1) for m in (original(), other))
        total += float((p * (p / q).log()).sum())
    assert row.kl == pytest.approx(total / want.tokens, abs=1e-5)
    # the model was left as it was found, its maps the very same
    assert torch.equal(model(tiny_models.tokens(1, 40)).logits, before)
    assert all(m.self_attn.linattn is c for m, c in zip(model.model.layers, children, strict=True))


def test_the_original_loses_nothing(model, tokenizer):
    row = evaluator_of(model, tokenizer).measure((0, 1, 2, 3), (OWN, {}), recall=False)
    (want,) = measure(original(), tokenizer, TEXTS, [LENGTH], stride="full", max_tokens=6 * LENGTH)
    assert row.kl == 0
    assert row.nats == pytest.approx(want.nats, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_change_nothing(tokenizer, dtype):
    model = learned(original(dtype=dtype))
    one = evaluator_of(model, tokenizer).measure((1,), (OWN, {}), recall=False)
    three = evaluator_of(model, tokenizer, batch_size=3).measure((1,), (OWN, {}), recall=False)
    assert one.tokens == three.tokens
    assert one.nats == pytest.approx(three.nats, rel=1e-5 if dtype == torch.float32 else 1e-2)
    with pytest.raises(OptionError, match="batch_size must be at least 1"):
        evaluator_of(model, tokenizer, batch_size=0)


def test_tokens_that_the_model_rules_out_do_not_spoil_the_divergence(model, tokenizer):
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(257))
    model.lm_head.bias.data[5] = float("-inf")
    row = evaluator_of(model, tokenizer).measure((), (OWN, {}), recall=False)
    assert 0 < row.kl < 10


# --------------------------------------------------------------------------------------- ranking


def test_a_layer_whose_attention_does_nothing_goes_last(model, tokenizer):
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
    for sense in ("replace", "restore"):
        for rank in ("kl", "perplexity"):
            found = ranked(model, tokenizer, rank=rank, sense=sense)
            assert abs(found.layer_values[rank][2]) < 1e-6
            nats = found.layer_values["perplexity"]
            assert rank == "kl" or found.order == sorted(range(4), key=lambda i: -nats[i])
        assert found.rank == "perplexity"
    assert ranked(model, tokenizer, rank="kl").order[-1] == 2


def test_recall_decides_where_there_is_any(model, tokenizer, fake):
    fake()
    found = ranked(model, tokenizer, recall=Recall(samples=20))
    assert found.rank == "recall_over_perplexity"
    assert found.note == ""
    assert found.layer_values["recall"] == pytest.approx(COSTS)
    want = recall_over_perplexity(COSTS, found.layer_values["perplexity"])
    assert found.scores["recall_over_perplexity"] == pytest.approx(want)
    assert set(found.order[:2]) == {1, 2}
    few = ranked(model, tokenizer, recall=Recall(samples=2))
    assert (few.rank, few.order[:2]) == ("logprob", [1, 2])
    assert list(few.scores) == ["logprob", "perplexity", "kl"]
    assert ranked(model, tokenizer, rank="recall", recall=Recall()).order[:2] == [1, 2]
    back = ranked(model, tokenizer, rank="recall", sense="restore", recall=Recall())
    assert back.layer_values["recall"] == pytest.approx(COSTS)


def test_an_original_that_cannot_recall_is_ranked_otherwise_and_says_so(model, tokenizer, fake):
    calls = []
    fake(best=0.05, calls=calls)
    found = ranked(model, tokenizer, recall=Recall(samples=10))
    assert found.rank == "kl"
    assert "recall is 5 % in 10 samples (chance 1 %)" in found.note
    assert "ranked by kl" in found.note
    assert "recall" not in found.scores
    assert len(calls) == 1  # the layers are not asked what the original does not know
    with pytest.raises(OptionError, match=r"cannot do the task.*--rank kl.*--force-recall"):
        ranked(model, tokenizer, rank="recall", recall=Recall())
    forced = ranked(model, tokenizer, rank="recall", recall=Recall(), force_recall=True)
    assert forced.layer_values["recall"] == pytest.approx([0.0, 0.05, 0.05, 0.0])
    with pytest.raises(OptionError, match="recall needs recall, and no task"):
        ranked(model, tokenizer, rank="recall")


# ----------------------------------------------------------------------------------------- plans


def test_plans_are_what_patch_model_takes(model, tokenizer):
    found = ranked(model, tokenizer, rank="kl")
    for keep in range(5):
        plan = json.loads(json.dumps(plan_for(found, keep)))
        patches = [row.patch for row in describe(patch_model(original(), plan))]
        want = {i: OWN if i in found.kept(keep) else "hedgehog" for i in range(4)}
        assert patches == list(want.values())
    plan = json.loads(json.dumps(plan_for(found, 1, ("nope+logn", {"logn": {"train_length": 32}}))))
    rows = list(describe(patch_model(original(), plan)))
    assert rows[found.order[0]].options == {"logn": {"train_length": 32}}
    for wrong in (5, -1):
        with pytest.raises(OptionError, match="softmax layers of 4: expected 0 to 4"):
            plan_for(found, wrong)


def test_a_plan_in_short():
    layers = stack(6)
    assert plan_of(layers, {1}) == {"0,2-5": "hedgehog", "1": "softmax"}
    assert plan_of(layers, ()) == {"0-5": "hedgehog"}
    assert plan_of(layers, range(6)) == {"0-5": "softmax"}
    windows = [Layer(i, str(i), "", "window+elu1", {"window": {"size": 8 + i // 2}}) for i in range(4)]
    assert plan_of(windows, {3}) == {
        "0-1": ["window+elu1", {"window": {"size": 8}}],
        "2": ["window+elu1", {"window": {"size": 9}}],
        "3": "softmax",
    }


def test_modules_that_share_an_index_are_named():
    """A decoder's two attentions have one index: a plan by it would mean both."""
    layers = [Layer(i, f"layers.{i}.self_attn", f"layers.{i}.self_attn", "elu1") for i in range(2)]
    assert plan_of(layers, {1}) == {"layers.0.self_attn": "elu1", "layers.1.self_attn": "softmax"}


def test_state_is_what_describe_says(model):
    layers = layers_of(model)
    hybrid = describe(patch_model(original(), {"0,2": "hedgehog"}))
    for tokens in (1, 1000):
        want = sum(row.state_bytes or tokens * (row.bytes_per_token or 0) for row in hybrid)
        assert state_bytes(layers, {1, 3}, tokens) == want
    assert state_bytes(stack(2), {0}, 10) is None


# -------------------------------------------------------------------------------------- refusals


def test_models_that_cannot_be_asked(tokenizer):
    with pytest.raises(NotPatchedError, match="not patched: which layers stay softmax is asked of"):
        layers_of(original())
    with pytest.raises(
        PlanError, match=r"a part of the layers only: model.layers.1.self_attn, model.layers.3"
    ):
        layers_of(patch_model(original(), {"0,2": "elu1"}))
    bert = tiny_models.build(
        "BertForMaskedLM", num_hidden_layers=2, **{**tiny_models.SIZES, "head_dim": None}
    )
    with pytest.raises(UnsupportedModelError, match="sees later tokens"):
        layers_of(patch_model(bert, "elu1"))
    bart = tiny_models.build("BartForConditionalGeneration", **tiny_models.ENCODER_DECODER_SIZES)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        layers_of(patch_model(bart, "elu1"))


def test_layers_with_a_window_stay_out_of_the_question():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = tiny_models.build(
        "Gemma3ForCausalLM", num_hidden_layers=4, sliding_window=8, layer_types=kinds, **tiny_models.SIZES
    )
    layers = layers_of(patch_model(model, "elu1"))
    assert [layer.number for layer in layers] == [1, 3]
    assert plan_of(layers, {3}) == {"1": "elu1", "3": "softmax"}
    assert sliding_of(model) == "keep"
    patch_model(model, "elu1", sliding="global")
    layers = layers_of(model)
    assert [layer.window for layer in layers] == ["sliding", None] * 2
    assert sliding_of(model) == "global"


def test_text_and_options_that_do_not_do(model, tokenizer):
    with pytest.raises(DataError, match="every document is empty"):
        rank_layers(model, tokenizer, ["", ""], length=LENGTH)
    with pytest.raises(DataError, match="0 of 1 documents reach 64"):
        rank_layers(model, tokenizer, ["short"], length=LENGTH)
    with pytest.raises(OptionError, match="max_tokens 8 is less than one window"):
        rank_layers(model, tokenizer, TEXTS, length=LENGTH, max_tokens=8)
    with pytest.raises(OptionError, match="rank must be one of recall_over_perplexity, recall"):
        ranked(model, tokenizer, rank="ppl")
    with pytest.raises(OptionError, match="sense must be replace or restore"):
        ranked(model, tokenizer, sense="both")


def test_an_original_of_other_weights_is_told(model, tmp_path):
    original().save_pretrained(tmp_path / "same")
    original(3).save_pretrained(tmp_path / "smaller")
    check_original(model, str(tmp_path / "same"))
    with pytest.raises(CheckpointError, match=r"is not the original of this model: 'model.layers.3"):
        check_original(model, str(tmp_path / "smaller"))
    broken, broken_original = (original() for _ in range(2))
    for each in (broken, broken_original):
        each.model.norm.weight.data[0] = torch.nan
    broken_original.save_pretrained(tmp_path / "broken")
    check_original(broken, str(tmp_path / "broken"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(CheckpointError, match=r"fine-tuned: 'model.layers.1.mlp.up_proj.weight' differs"):
        check_original(model, str(tmp_path / "same"))


@torch.no_grad()
def test_putting_softmax_back_keeps_what_was_learned(model):
    ids = tiny_models.tokens(1, 40)
    with bypassed(model, ["*.1.self_attn", "*.2.self_attn"]):
        want = model(ids).logits
    put(model, {"model.layers.1.self_attn": None, "model.layers.2.self_attn": None})
    assert torch.equal(model(ids).logits, want)
    assert [row.patch for row in describe(model)] == ["hedgehog", OWN, OWN, "hedgehog"]
    with pytest.raises(OptionError, match="nope"):
        put(model, {"model.layers.0.self_attn": ("nope", {"rope": False})})
    assert torch.equal(model(ids).logits, want)
