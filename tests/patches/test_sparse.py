"""Patches that see few keys: what they equal, what their options mean, where they stop."""

import pytest
import torch
from helpers import tiny_models
from helpers.patch_factory import call, made, seen, weights
from helpers.properties import logits, model_of

from hf_linattn import patch_model, unpatch_model
from hf_linattn.errors import OptionError, UnsupportedCallError, UnsupportedMaskError
from hf_linattn.patching.discovery import find_sites
from hf_linattn.registry import find


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def change(model, ids, mask, patch, **options):
    """Largest change of the logits that a patch makes."""
    before = logits(model, ids, mask)
    patch_model(model, patch, options=options)
    after = logits(model, ids, mask)
    unpatch_model(model)
    return tiny_models.distance(after[mask.bool()], before[mask.bool()])


SAME_AS_SOFTMAX = [
    ("local", {"size": 50}),
    ("local", {"size": 10, "before": 4}),
    ("strided", {"stride": 1}),
    ("strided", {"stride": 50}),
    ("strided", {"stride": 7, "window": 50}),
    ("topk", {"k": 50}),
    ("topk", {"k": 1000}),
    ("pooled", {"size": 1}),
    ("pooled", {"size": 1, "pool": "conv"}),
    ("linformer", {"rank": 50, "max_length": 50}),
]


@pytest.mark.parametrize(("patch", "options"), SAME_AS_SOFTMAX)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_softmax_where_nothing_is_left_out(family, patch, options):
    if family == "llama" and patch == "linformer":
        pytest.skip("encoders only")
    model = model_of(family)
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 50), 11)
    assert change(model, ids, mask, patch, **options) < 1e-12
    smaller = {key: max(1, value // 10) for key, value in options.items() if isinstance(value, int)}
    smaller.update({"pooled": {"size": 3}, "linformer": {"max_length": 50}}.get(patch, {}))
    if patch == "strided":
        smaller = {"stride": 7, "window": 2}
    if options != {"k": 1000}:
        assert change(model, ids, mask, patch, **smaller) > 1e-3


def test_many_rounds_of_two_buckets_come_close_to_softmax():
    model = model_of("llama")
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 50), 11)
    few, some, many = (change(model, ids, mask, "lsh", buckets=2, rounds=r) for r in (1, 4, 64))
    assert many < 0.02 < some < few


REFUSED = [
    ("local", {"size": 0}, "size must be at least 1 token, got 0"),
    ("local", {"before": -1}, "before must be at least 0 blocks, got -1"),
    ("strided", {"stride": 0}, "stride must be at least 1 token, got 0"),
    ("strided", {"window": 0}, "window must be at least 1 token, got 0"),
    ("topk", {"k": 0}, "k must be at least 1 key, got 0"),
    ("lsh", {"buckets": 0}, "buckets must be an even number of at least 2, got 0"),
    ("lsh", {"buckets": 5}, "buckets must be an even number of at least 2, got 5"),
    ("lsh", {"rounds": 0}, "rounds must be at least 1, got 0"),
    ("lsh", {"seed": -1}, "seed must be at least 0, got -1"),
    ("linformer", {"max_length": 0}, "max_length must be at least 1 token, got 0"),
    ("linformer", {"rank": 0}, r"rank must be from 1 to max_length \(256\), got 0"),
    ("linformer", {"rank": 65, "max_length": 64}, r"rank must be from 1 to max_length \(64\), got 65"),
    ("pooled", {"size": 0}, "size must be at least 1 token, got 0"),
    ("pooled", {"pool": "max"}, "option 'pool' of 'pooled' must be 'mean' or 'conv'"),
]


@pytest.mark.parametrize(("patch", "options", "message"), REFUSED)
def test_options_out_of_range_are_refused(patch, options, message):
    with pytest.raises(OptionError, match=message):
        patch_model(model_of("bert"), patch, options=options)


@pytest.mark.parametrize(
    ("patch", "options", "field", "lacks"),
    [
        ("lsh", {}, "head_dim", "head_dim cannot be told"),
        ("linformer", {}, "max_positions", "give max_length"),
        ("pooled", {"pool": "conv"}, "kv_heads", "take pool='mean'"),
    ],
)
def test_unknown_sizes_are_refused(patch, options, field, lacks):
    site = find_sites(model_of("bert"))[0]
    object.__setattr__(site, field, None)
    with pytest.raises(OptionError, match=lacks):
        find(patch)(site, **options)


class TestPatterns:
    def test_local_sees_its_block_and_those_before(self):
        rows = seen(made("local", size=4), call(13))
        assert rows[3] == [0, 1, 2, 3]
        assert rows[5] == [0, 1, 2, 3, 4, 5]
        assert rows[12] == [8, 9, 10, 11, 12]
        assert seen(made("local", size=4, before=0), call(13))[9] == [8, 9]
        assert seen(made("local", size=4, before=2), call(13))[9] == list(range(10))

    def test_local_encoders_see_the_block_behind(self):
        rows = seen(made("local", size=4), call(13, causal=False))
        assert rows[0] == list(range(8))
        assert rows[5] == list(range(12))
        assert rows[12] == list(range(8, 13))

    def test_strided_sees_near_tokens_and_every_stride_th(self):
        rows = seen(made("strided", stride=4, window=2), call(13))
        assert rows[12] == [0, 4, 8, 11, 12]
        assert rows[1] == [0, 1]
        assert seen(made("strided", stride=4), call(13))[12] == [0, 4, 8, 9, 10, 11, 12]
        rows = seen(made("strided", stride=4, window=2), call(13, causal=False))
        assert rows[5] == [1, 4, 5, 6, 9]

    def test_custom_masks_in_which_tokens_have_no_places_are_refused(self):
        model = patch_model(model_of("llama"), "local")
        islands = torch.ones(6, 6, dtype=torch.bool).tril()
        islands[5, 1] = False
        with pytest.raises(UnsupportedMaskError):
            model(tiny_models.tokens(1, 6), attention_mask=islands[None, None])

    @pytest.mark.parametrize("patch", ["local", "strided", "lsh", "flow"])
    def test_cross_attention_is_refused(self, patch):
        model = tiny_models.build("BartForConditionalGeneration", **tiny_models.ENCODER_DECODER_SIZES)
        patch_model(model, {"*.encoder_attn": patch})
        with pytest.raises(UnsupportedCallError, match="one sequence"):
            model(tiny_models.tokens(1, 6), decoder_input_ids=tiny_models.tokens(1, 3))


class TestTopK:
    def test_each_query_keeps_k_keys(self):
        rows = seen(made("topk", k=3), call(20))
        assert [len(row) for row in rows] == [1, 2, *[3] * 18]

    def test_ties_with_the_kth_are_kept(self):
        given = call(6)
        given.key[:, :, 4:] = given.key[:, :, 3:4]
        rows = seen(made("topk", k=1), given)
        assert rows[5] in ([3, 4, 5], [0], [1], [2])
        given.query = given.key.repeat_interleave(2, 1) * 100
        assert seen(made("topk", k=1), given)[5] == [3, 4, 5]

    def test_sinks_of_the_model_stay_in_the_denominator(self):
        sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
        with_sink = weights(made("topk", k=3), call(20, sink=sink))
        without = weights(made("topk", k=3), call(20))
        given = call(20)
        scores = given.query @ given.key.repeat_interleave(2, 1).mT * given.scaling
        kept = torch.where(without > 0, scores.exp(), 0.0).sum(-1, keepdim=True)
        assert tiny_models.distance(with_sink, without * kept / (kept + sink.exp()[:, None, None])) < 1e-12

    def test_scores_without_bound(self):
        given = call(20)
        given.query = given.query.float() * 1e18
        given.key, given.value = given.key.float() * 1e18, given.value.float()
        assert made("topk", k=3).float()(given)[0].isfinite().all()


class TestLsh:
    def test_rotations_follow_seed_and_layer_alone(self):
        torch.manual_seed(1)
        first = made("lsh").rotations
        torch.manual_seed(2)
        assert torch.equal(made("lsh").rotations, first)
        assert not torch.equal(made("lsh", seed=1).rotations, first)
        assert not torch.equal(made("lsh", layer=1).rotations, first)
        assert first.shape == (4, 8, 8)
        assert torch.equal(first.bfloat16().double(), first)

    def test_a_query_sees_its_bucket_and_itself(self):
        given = call(2, heads=2)
        given.key[:, :, 0] = given.query[:, :, 1] * 3  # same direction
        assert seen(made("lsh", buckets=16, rounds=1), given)[1] == [0, 1]
        given = call(2, heads=2)
        given.key[:, :, 0] = -given.query[:, :, 1]  # never in one bucket
        assert seen(made("lsh", buckets=16, rounds=50), given)[1] == [1]

    def test_more_rounds_see_more_and_more_buckets_see_less(self):
        def count(**options):
            return int((weights(made("lsh", **options), call(60)) > 0).sum())

        assert count(rounds=1) < count(rounds=4) < count(rounds=16)
        assert count(buckets=32) < count(buckets=8) < count(buckets=2)

    def test_shared_is_reformer_where_query_and_key_are_one(self):
        patch = made("lsh", buckets=4, rounds=2, shared=True)
        given = call(40, heads=2)
        given.query = given.key
        got, x = weights(patch, given), given.key
        bucket = torch.cat([x @ r for r in patch.rotations], -1).unflatten(-1, (2, 2))
        bucket = torch.cat([bucket, -bucket], -1).argmax(-1)
        for i in range(40):
            same = (bucket[:, :, i : i + 1] == bucket[:, :, : i + 1]).any(-1)
            same[..., i] = ~same[..., :i].any(-1)
            scores = (x[:, :, i : i + 1] * x[:, :, : i + 1]).sum(-1) / x[:, :, : i + 1].norm(dim=-1)
            want = scores.masked_fill(~same, -torch.inf).softmax(-1)
            assert tiny_models.distance(got[:, :, i, : i + 1], want) < 1e-12

    def test_shared_takes_the_length_from_the_query(self):
        patch = made("lsh", buckets=2, rounds=8, shared=True)
        given, other = call(10), call(10)
        other.query = other.query.flip(-1)
        want = patch(given)[0]
        assert tiny_models.distance(patch(other)[0], want) < 1e-12
        other.query = other.query * 2
        assert tiny_models.distance(patch(other)[0], want) > 1e-3

    def test_zero_vectors(self):
        given = call(5)
        given.key = given.key * 0
        given.query = given.query * 0
        assert made("lsh", shared=True)(given)[0].isfinite().all()


CACHED = [
    ("local", {"size": 6}),
    ("strided", {"stride": 5, "window": 2}),
    ("topk", {"k": 4}),
    ("lsh", {"buckets": 4, "rounds": 2}),
    ("lsh", {"buckets": 4, "rounds": 2, "shared": True}),
    ("pooled", {"size": 4}),
    ("flow", {}),
]


@pytest.mark.parametrize(("patch", "options"), CACHED)
def test_a_static_cache_generates_the_same(patch, options):
    model = patch_model(tiny_models.llama(), patch, options=options)
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 13), 3)
    want = tiny_models.grow(model, ids, 12, mask)
    for kind in ("dynamic", "static"):
        settings = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
        got = model.generate(ids, attention_mask=mask, cache_implementation=kind, **settings)
        assert torch.equal(got, want), kind
