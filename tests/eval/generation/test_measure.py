"""Continuations side by side, against full forwards and formulas."""

import pytest
import torch
from helpers import tiny_models
from helpers.fixtures_perplexity import make_folder
from helpers.real_data import DATA, needs_data
from transformers import AutoTokenizer

from hf_linattn import from_pretrained, patch_model, unpatch_model
from hf_linattn.errors import DataError, NotPatchedError, OptionError, UnsupportedModelError
from hf_linattn.eval.generation import compare_generation, comparison, measure

PROMPTS = ["one two", "three …", "seven", "1 4 9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def model(folder):
    return from_pretrained(str(folder), dtype=torch.float64).eval()


def grown(model, ids, steps):
    """Greedy, without a cache."""
    return tiny_models.grow(model, torch.tensor([ids]), steps)[0, len(ids) :].tolist()


def log_p(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)


class TestMeasures:
    def test_against_full_forwards(self, model, tokenizer, folder):
        other = patch_model(
            from_pretrained(str(folder), dtype=torch.float64), "window+elu1", options={"size": 6}
        )
        found = compare_generation(model, {"hybrid": other}, tokenizer, PROMPTS, new_tokens=20, batch_size=2)
        assert found.prompts == [tokenizer(text)["input_ids"] for text in PROMPTS]
        assert found.labels == ["original", "hybrid"]
        for ids, first, second in zip(found.prompts, found.of("original"), found.of("hybrid"), strict=True):
            assert first.ids == grown(model, ids, 20)
            assert second.ids == grown(other, ids, 20)
            same = [a == b for a, b in zip(first.ids, second.ids, strict=True)]
            assert second.agreement == [*same, False].index(False)
            both = [log_p(side, ids + first.ids)[len(ids) - 1 : -1] for side in (model, other)]
            kl = (both[0].exp() * (both[0] - both[1])).sum(-1)
            assert second.kl == pytest.approx(kl.tolist(), abs=1e-5)
            assert list(second.top1) == (both[0].argmax(-1) == both[1].argmax(-1)).tolist()
        assert max(max(one.kl) for one in found.of("hybrid")) > 0.05

    def test_summary_is_the_mean_of_what_it_sums_up(self, model, tokenizer, folder):
        other = patch_model(from_pretrained(str(folder), dtype=torch.float64), "elu1")
        found = compare_generation(model, {"elu1": other}, tokenizer, PROMPTS, new_tokens=20)
        rows, (first, summary) = found.of("elu1"), found.summaries()
        kl = torch.tensor([row.kl for row in rows], dtype=torch.float64)
        same = torch.tensor([row.top1 for row in rows]).double()
        assert (first.kl, first.agreement, first.buckets) == (None, None, ())
        assert summary.kl == pytest.approx(float(kl.mean()))
        assert summary.kl_stderr == pytest.approx(float(kl.mean(1).std() / 4**0.5))
        assert summary.top1 == pytest.approx(float(same.mean()))
        assert summary.agreement == sum(row.agreement for row in rows) / 4
        spans = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 20)]
        assert [(b.first, b.last) for b in summary.buckets] == spans
        for bucket, (low, high) in zip(summary.buckets, spans, strict=True):
            assert bucket.tokens == 4 * (high - low + 1)
            assert bucket.kl == pytest.approx(float(kl[:, low - 1 : high].mean()))
            assert bucket.top1 == pytest.approx(float(same[:, low - 1 : high].mean()))

    def test_the_original_is_inside_a_patched_model(self, model, tokenizer, folder):
        other = patch_model(from_pretrained(str(folder), dtype=torch.float64), "elu1")
        want = compare_generation(model, {"x": other}, tokenizer, PROMPTS, new_tokens=9)
        got = compare_generation(None, {"x": other}, tokenizer, PROMPTS, new_tokens=9, batch_size=1)
        assert [one.ids for one in got.continuations] == [one.ids for one in want.continuations]
        for one, two in zip(got.of("x"), want.of("x"), strict=True):
            assert one.kl == pytest.approx(two.kl, abs=1e-6)

    def test_models_are_left_as_they_are_found(self, model, tokenizer):
        ids = torch.tensor([tokenizer("some text")["input_ids"]])
        other = patch_model(tiny_copy(model), "elu1").train()
        before = other(ids, use_cache=False).logits
        compare_generation(model, {"x": other}, tokenizer, PROMPTS, new_tokens=3)
        assert other.training
        assert not model.training
        assert torch.equal(other(ids, use_cache=False).logits, before)

    def test_the_same_model_agrees_everywhere(self, model, tokenizer):
        found = compare_generation(model, {"x": patch_model(tiny_copy(model), "softmax")}, tokenizer, PROMPTS)
        summary = found.summaries()[1]
        assert (summary.agreement, summary.identical, summary.top1) == (64, 4, 1)
        assert summary.kl < 1e-6

    def test_half_precision(self, folder, tokenizer):
        half = [from_pretrained(str(folder), dtype=torch.bfloat16) for _ in range(2)]
        patch_model(half[1], "elu1")
        found = compare_generation(half[0], {"x": half[1]}, tokenizer, PROMPTS, new_tokens=12)
        assert 0 < found.summaries()[1].kl < 10

    def test_texts_end_at_the_token_that_says_so(self, model, tokenizer, folder):
        free = compare_generation(
            model, {"x": patch_model(tiny_copy(model), "elu1")}, tokenizer, PROMPTS, new_tokens=30
        )
        first = free.of("original")[1].ids
        end = next(token for token in first[4:] if token not in first[:4])
        model.generation_config.eos_token_id = [end]
        other = patch_model(tiny_copy(model), "elu1")
        other.generation_config.eos_token_id = None  # the original's counts
        found = compare_generation(model, {"x": other}, tokenizer, PROMPTS, new_tokens=30)
        for label in ("original", "x"):
            for one, whole in zip(found.of(label), free.of(label), strict=True):
                cut = whole.ids.index(end) + 1 if end in whole.ids else 30
                assert one.ids == whole.ids[:cut]
        lengths = [len(one.ids) for one in found.of("original")]
        assert lengths[1] < 30
        assert [len(one.kl) for one in found.of("x")] == lengths
        assert sum(bucket.tokens for bucket in found.summaries()[1].buckets) == sum(lengths)

    @pytest.mark.parametrize(
        ("ids", "share"),
        [
            ([1, 2, 3], None),
            ([1, 2, 3, 4], 0.0),
            ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
            ([5] * 10, 6 / 7),
            (list(range(50)), 0.0),
        ],
    )
    def test_repetition(self, ids, share):
        assert comparison.repetition(ids) == (None if share is None else pytest.approx(share))

    def test_agreement(self):
        assert comparison.agreement([1, 2, 3], [1, 2, 3]) == 3
        assert comparison.agreement([1, 2, 3], [1, 2]) == 2
        assert comparison.agreement([1, 2], [3, 2]) == 0
        assert measure.stops(torch.nn.Linear(1, 1)) == frozenset()


def tiny_copy(model):
    copy = type(model)(model.config).to(model.dtype).eval()
    copy.load_state_dict(model.state_dict())
    return copy


class TestRefusals:
    def test_encoders(self, tokenizer):
        bert = tiny_models.build(
            "BertForMaskedLM", **{**tiny_models.SIZES, "head_dim": None, "vocab_size": 257}
        )
        other = patch_model(
            tiny_models.build("BertForMaskedLM", **{**tiny_models.SIZES, "vocab_size": 257}), "elu1"
        )
        with pytest.raises(UnsupportedModelError, match="sees later tokens"):
            compare_generation(bert, {"x": other}, tokenizer, PROMPTS)
        bart = tiny_models.build(
            "BartForConditionalGeneration", **{**tiny_models.ENCODER_DECODER_SIZES, "vocab_size": 257}
        )
        with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
            compare_generation(bart, {"x": other}, tokenizer, PROMPTS)

    def test_other_vocabularies(self, model, tokenizer):
        with pytest.raises(DataError, match="x predicts one of 300 tokens, the original one of 257"):
            compare_generation(
                model, {"x": tiny_models.llama(vocab_size=300)}, tokenizer, PROMPTS, new_tokens=3
            )

    def test_texts_longer_than_learned_positions(self, tokenizer):
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": 257}
        gpt2 = patch_model(tiny_models.build("GPT2LMHeadModel", **sizes), "elu1")
        with pytest.raises(UnsupportedModelError, match="its table ends at 32"):
            compare_generation(None, {"x": gpt2}, tokenizer, PROMPTS, new_tokens=30)

    def test_predictions_that_are_no_numbers(self, model, tokenizer):
        other = tiny_copy(model)
        torch.nn.init.constant_(other.lm_head.weight, float("nan"))
        with pytest.raises(DataError, match="not numbers: the weights hold NaN, or a sum overflows"):
            compare_generation(model, {"x": other}, tokenizer, PROMPTS)

    def test_nothing_to_compare(self, model, tokenizer):
        other = patch_model(tiny_copy(model), "elu1")
        with pytest.raises(OptionError, match="at least one other"):
            compare_generation(model, {}, tokenizer, PROMPTS)
        with pytest.raises(OptionError, match="none of them 'original'"):
            compare_generation(model, {"original": other}, tokenizer, PROMPTS)
        with pytest.raises(OptionError, match="an original of their own"):
            compare_generation(None, {"x": other, "y": other}, tokenizer, PROMPTS)
        with pytest.raises(NotPatchedError, match="nothing to bypass"):
            compare_generation(None, {"x": model}, tokenizer, PROMPTS)
        with pytest.raises(DataError, match="no text"):
            compare_generation(model, {"x": other}, tokenizer, ["", ""])
        for numbers in ({"new_tokens": 0}, {"batch_size": 0}):
            with pytest.raises(OptionError, match="at least 1, got"):
                compare_generation(model, {"x": other}, tokenizer, PROMPTS, **numbers)


@needs_data
def test_what_a_real_model_writes():
    """softmax1 changes nearly nothing in it, elu1 without training nearly everything."""
    folder = str(DATA / "models" / "stories260k")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = from_pretrained(folder)
    near, far = patch_model(from_pretrained(folder), "softmax1"), patch_model(from_pretrained(folder), "elu1")
    prompts = ["Once upon a time, there was a little girl", "One day, a cat"]
    found = compare_generation(model, {"near": near, "far": far}, tokenizer, prompts, new_tokens=32)
    first, *others = found.summaries()
    text = tokenizer.decode(found.of("original")[0].ids)
    assert "She" in text or "Lily" in text
    assert others[0].kl < 0.1 < 1 < others[1].kl
    assert others[0].agreement > others[1].agreement
    assert others[0].top1 > 0.9 > others[1].top1
    assert first.repetition < others[1].repetition
    unpatch_model(near)
    assert (
        compare_generation(model, {"x": near}, tokenizer, prompts, new_tokens=8).summaries()[1].identical == 2
    )
