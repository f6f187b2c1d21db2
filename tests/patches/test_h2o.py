"""Heavy hitters beside a window: what is kept, that nothing moves it, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from helpers import bounded, exports, real_data, tiny_models
from helpers.holes import CUTS, HOLES, alone, rows, run
from helpers.oracle import as_oracle
from helpers.properties import close, learned, logits, model_of
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_linattn import describe, patch_model, unpatch_model
from hf_linattn.attention import Tokens
from hf_linattn.errors import CacheError, OptionError, UnsupportedCallError, UnsupportedModelError

OPTIONS = {"size": 8, "sinks": 2, "heavy": 5, "half_life": 20.0, "positions": "text"}


def patched(dtype=torch.float64, family="llama", **options):
    return patch_model(model_of(family, dtype), "h2o", options={**OPTIONS, **options})


@torch.no_grad()
@pytest.mark.parametrize("size", [8, 16, 3])
def test_padding_inside_a_row_and_cuts_move_nothing(size):
    model = patched(size=size)
    want = alone(model, rows())
    for cuts in CUTS.values():
        close(run(model, rows(), cuts)[HOLES == 1], want, 1e-9)


@torch.no_grad()
def test_rows_with_holes_are_the_formula():
    model = patched()
    got = run(model, rows(), CUTS["chunks"])
    unpatch_model(model)
    with as_oracle(model, "h2o", **OPTIONS):
        close(got[HOLES == 1], alone(model, rows()), 1e-6)


@torch.no_grad()
def test_room_for_all_tokens_is_softmax():
    model, ids = model_of("llama"), tiny_models.tokens(2, 120)
    want = model(ids).logits
    for count, same in ((120, True), (60, False)):
        patch_model(model, "h2o", options={**OPTIONS, "heavy": count})
        assert (tiny_models.distance(model(ids).logits, want) < 1e-6) == same


def given(query, key, value, valid=None):
    """Tokens with the number of keys that each query sees."""
    shown = torch.ones(len(key), key.shape[2], dtype=torch.bool) if valid is None else valid
    return Tokens(query, key, value, 1.0, valid, shown.cumsum(1).float())


def parts(keys):
    """Queries, keys and values of one row: every query looks for the same direction."""
    query = torch.zeros(1, 4, 60, 8, dtype=torch.float64)
    query[..., 0] = 3.0
    key = torch.zeros(1, 2, 60, 8, dtype=torch.float64)
    for head, found in enumerate(keys):
        key[:, head, found, 0] = 2.0
    return query, key, torch.arange(60.0, dtype=torch.float64).expand(1, 2, 8, 60).mT.clone()


@torch.no_grad()
def test_each_key_head_keeps_what_its_queries_look_at():
    module = patched(sinks=0, heavy=2).model.layers[0].self_attn.linattn.h2o
    state = module.causal(given(*parts([[10, 30], [5, 6]])), None)[1]
    kept = state.value[0, :, : module.heavy, 0]
    assert kept.sort(-1).values.tolist() == [[10.0, 30.0], [5.0, 6.0]]


@torch.no_grad()
def test_attention_of_long_ago_counts_less():
    """The first was looked at for long, the second is now."""
    query, key, value = parts([[], []])
    query[:, :, 30:, 0], query[:, :, 30:, 1] = 0.0, 3.0
    key[:, :, 2, 0] = key[:, :, 25, 1] = 3.0
    for half_life, kept in ((None, 2.0), (2.0, 25.0)):
        module = patched(sinks=0, heavy=1, half_life=half_life).model.layers[0].self_attn.linattn.h2o
        state = module.causal(given(query, key, value), None)[1]
        assert state.value[0, :, 0, 0].tolist() == [kept, kept]


@torch.no_grad()
def test_what_is_too_far_back_goes_first():
    """Two tokens get all attention, and the first of them too much of it to be forgotten."""
    query, key, value = parts([[3, 9], [4, 9]])
    for head, token in enumerate((3, 4)):
        key[:, head, token, 0] = 4.0
    stays = {}
    for reach in (None, 30):
        module = patched(sinks=0, heavy=1, half_life=None, reach=reach).model.layers[0].self_attn.linattn.h2o
        states = [
            module.causal(given(query[:, :, :n], key[:, :, :n], value[:, :, :n]), None)[1] for n in (30, 60)
        ]
        stays[reach] = [state.value[0, :, 0, 0].tolist() for state in states]
    assert stays[None] == [[3.0, 4.0]] * 2
    assert stays[30][0] == [3.0, 4.0]
    assert min(stays[30][1]) > 25


def test_what_is_kept_stays_within_the_context():
    module = patched().model.layers[0].self_attn.linattn.h2o
    assert module.reach == 256 - 2 * module.block - module.heavy
    assert patched(size=240).model.layers[0].self_attn.linattn.h2o.reach is None  # no room
    assert patched(reach=None).model.layers[0].self_attn.linattn.h2o.reach is None


@real_data.needs_data
@torch.no_grad()
def test_a_real_model_is_flat_beyond_its_context():
    """Of 512 tokens; where distances have no end, the loss of the second half rises by a half."""
    folder = real_data.DATA / "models/books-1m"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = (real_data.DATA / "text/books/eval/Emma.md").read_text(encoding="utf-8")[200_000:220_000]
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[:, :4096]
    losses = {}
    for reach in ("auto", None):
        patch_model(model, "h2o", options={"size": 64, "heavy": 32, "reach": reach})
        logits = model(ids).logits[0, :-1].split(512)
        targets = ids[0, 1:].split(512)
        losses[reach] = [float(F.cross_entropy(*pair)) for pair in zip(logits, targets, strict=True)]
    assert max(losses["auto"][4:]) < 1.05 * max(losses["auto"][:4])
    assert losses[None][-1] > losses["auto"][-1] + 0.5


@torch.no_grad()
def test_padding_of_nan_reaches_nothing():
    module = patched().model.layers[0].self_attn.linattn.h2o
    query, key, value = (torch.randn(2, h, 60, 8, dtype=torch.float64) for h in (4, 2, 2))
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[0, 20:26] = valid[1, :9] = False
    want = module.causal(given(query, key, value, valid), None)[0]
    for x in (query, key, value):
        x.masked_fill_(~valid[:, None, :, None], float("nan"))
    got, state = module.causal(given(query, key, value, valid), None)
    assert torch.equal(got, want)
    assert not got.transpose(1, 2)[~valid].any()
    assert all(x.isfinite().all() for x in state)


@torch.no_grad()
def test_sinks_stay_as_near_as_the_window_is_long():
    """Where all scores but those of the sinks are as they were, the distance of the sinks is another."""
    ids = tiny_models.tokens(1, 90)
    text, cache = (logits(patched(positions=name), ids) for name in ("text", "cache"))
    close(text[:, :10], cache[:, :10], 1e-9)
    assert tiny_models.distance(text[:, 20:], cache[:, 20:]) > 1e-4
    assert torch.equal(cache, logits(patched(positions="auto"), ids))


def test_memory_is_flat_and_told():
    bounded.check_memory_is_flat_and_told(patched(torch.float32))


def test_rows_change_places_and_tokens_are_taken_back():
    bounded.check_rows_change_places_and_tokens_are_taken_back(patched())


@torch.no_grad()
def test_a_cache_of_the_unpatched_model_is_refused():
    model, ids, cache = model_of("llama"), tiny_models.tokens(2, 60), DynamicCache()
    model(ids[:, :50], past_key_values=cache)
    patch_model(model, "h2o", options=OPTIONS)
    with pytest.raises(CacheError, match="'h2o' needs the queries of past tokens"):
        model(ids[:, 50:], past_key_values=cache)


def test_static_caches_and_compiled_code():
    model = patch_model(tiny_models.llama(1), "h2o", options=OPTIONS)
    bounded.check_static_caches_and_compiled_code(model)


def test_a_whole_text_compiles():
    ids = tiny_models.tokens(2, 40)  # six rounds
    model = patch_model(tiny_models.llama(1), "h2o", options={**OPTIONS, "size": 24})
    with torch.no_grad():
        want = logits(model, ids)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        close(found.logits, want, 1e-9)
    torch._dynamo.reset()


def test_exporting_is_refused():
    with pytest.raises(UnsupportedCallError, match="export 'window'"):
        exports.exported(exports.patched("h2o", **OPTIONS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be at least 1 token, got 0"),
        ({"size": 10**9}, "size must be at most 16,777,216 tokens, got 1,000,000,000: a cache has room for"),
        ({"heavy": 0}, "heavy must be at least 1 token, got 0; the patch 'window' keeps none"),
        ({"sinks": -1}, "sinks must be at least 0 tokens, got -1"),
        ({"half_life": 0.0}, "half_life must be above 0 tokens, or None, got 0.0"),
        ({"half_life": float("nan")}, "half_life must be above 0 tokens, or None, got nan"),
        ({"reach": 288}, "reach must be at least size \\+ size / 8 \\+ 1 = 289 tokens, got 288"),
    ],
)
def test_what_is_refused(options, message):
    model = model_of("llama")
    with pytest.raises(OptionError, match=message):
        patch_model(model, "h2o", options=options)
    assert not learned(model)


def test_encoders_are_refused():
    with pytest.raises(UnsupportedModelError, match="causal only: what is kept is what earlier queries"):
        patched(family="bert")


def test_kernels_are_named():
    assert "computed by" in str(describe(patched()))
    assert "computed by" in str(describe(patch_model(model_of("llama"), {"0": "h2o", "1": "window"})))
