"""A decoded token behind a window in one call of C++, against all pairs in float64; gates in the kernels."""

import copy
import pickle
import shutil

import pytest
import torch
from helpers import definitions, tiny_models
from helpers.linear_inputs import definition as sums_of
from helpers.linear_inputs import random_inputs
from helpers.random_inputs import relative_error
from helpers.selection import rest_full
from transformers import StaticCache

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.ops.cpp import build, linear, window_decode
from hf_linattn.ops.types import Gate, Inputs, OpConfig
from hf_linattn.patches.window.fused import fused_step
from hf_linattn.patches.window.ring import WindowState

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
SHAPES = {
    "one head": (1, 1, 1, 7, 8, 8),
    "shared keys, rows": (3, 6, 2, 20, 16, 24),
    "sizes of no whole vectors": (2, 2, 2, 9, 10, 6),
    "more than one tile": (1, 4, 4, 150, 64, 64),
    "a window of one": (2, 2, 1, 1, 8, 8),
}


def given(shape, column, hidden, dtype=torch.float32, seed=0):
    """A token, a ring whose oldest column is `column` in the first row, one on in each next, and a state."""
    (batch, heads, kv_heads, columns, size, wide), make = shape, torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(sizes, generator=make).to(dtype)

    token = (
        normal(batch, 1, heads, size).transpose(1, 2),
        normal(batch, 1, kv_heads, size).transpose(1, 2),
        normal(batch, 1, kv_heads, wide).transpose(1, 2),
    )
    valid_columns = torch.rand(batch, columns, generator=make) < (0.7 if hidden else 2)
    ring = window_decode.RingBuffer(
        normal(batch, kv_heads, columns, size),
        normal(batch, kv_heads, columns, wide),
        valid_columns,
        (column + torch.arange(batch)) % columns,
    )
    valid = torch.rand(batch, 1, generator=make) < 0.5 if hidden else None
    state = normal(batch, kv_heads, size, wide).float().abs(), normal(batch, kv_heads, size).float().abs() + 1
    return token, valid, ring, state


def definition(token, valid, ring, scaling, tail, log_decay, sinks=None):
    """Output `[B, H, 1, Dv]`, S and z, in float64."""
    (query, key, value), heads = (x.double() for x in token), token[0].shape[1]
    rows, column = torch.arange(len(query)), ring.head_index
    counts = torch.ones_like(ring.valid[:, :1]) if valid is None else valid
    keys, values, valid_columns = ring.key.double(), ring.value.double(), ring.valid.clone()
    S = z = others = None
    if tail is not None:
        evicted = tail.evicted or (keys[rows, :, column][:, :, None], values[rows, :, column][:, :, None])
        leaves = counts & valid_columns[rows, column, None]
        _, _, S, z = definitions.linear(
            torch.zeros_like(tail.query.double()),
            definitions.feature_map(evicted[0].double(), tail.kind, False, tail.eps),
            evicted[1].double(),
            hidden=~leaves,
            S=tail.S.double(),
            z=tail.z.double(),
            log_decay=torch.where(leaves, log_decay.double(), 0)[..., None],
        )
        phi_q = definitions.feature_map(tail.query.double(), tail.kind, True, tail.eps)
        shift = tail.query.double().amax(-1).clamp(max=0) if tail.kind == "elu1" else torch.zeros(())
        scale = shift if tail.query_log_scale is None else tail.query_log_scale.double()
        total = (phi_q @ definitions.repeated(z, heads)[..., None])[..., 0]
        others = phi_q @ definitions.repeated(S, heads), total, scale.expand_as(total)
    rows, column = rows[counts[:, 0]], column[counts[:, 0]]
    keys[rows, :, column], values[rows, :, column] = key[rows, :, 0], value[rows, :, 0]
    valid_columns[rows, column] = True
    scores = query @ definitions.repeated(keys, heads).mT * scaling
    scores, seen = scores.masked_fill(~valid_columns[:, None, None], float("-inf")), values
    if sinks is not None:
        met, sink_key, sink_value = (x.double() for x in sinks[:3])
        beside = met @ definitions.repeated(sink_key, heads).mT * scaling
        scores, seen = torch.cat([scores, beside], -1), torch.cat([values, sink_value], 2)
    if tail is None or tail.mix is None:
        return definitions.softmax(scores, seen, others), S, z, keys, values, valid_columns
    share = torch.where(others[1] > 0, tail.mix.double()[:, None], 1)[..., None]
    rest = (others[0] / others[1][..., None]).nan_to_num(0)
    output = share * definitions.softmax(scores, seen, None) + (1 - share) * rest
    return output, S, z, keys, values, valid_columns


def compare(token, valid, ring, tail, log_decay, tolerance=1e-5, sinks=None):
    want = definition(token, valid, ring, 0.3, tail, log_decay, sinks)
    step = 1 if valid is None else valid[:, 0].long()
    after = (ring.head_index + step) % ring.key.shape[2]
    got = window_decode.decode(*token, valid, ring, 0.3, tail, sinks)
    assert got.dtype == token[0].dtype
    assert relative_error(got.double(), want[0]) < tolerance
    if tail is not None:
        assert relative_error(tail.S.double(), want[1]) < 1e-5
        assert relative_error(tail.z.double(), want[2]) < 1e-5
    counts = want[-1][:, None, :, None]
    assert torch.equal(ring.key.double() * counts, want[3] * counts)
    assert torch.equal(ring.value.double() * counts, want[4] * counts)
    assert torch.equal(ring.valid, want[5])
    assert torch.equal(ring.head_index, after)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", [None, "elu1", "relu", "none"])
def test_a_step_is_the_formula(kind, shape, hidden, compiled):
    for column in {0, shape[3] // 2, shape[3] - 1}:
        token, valid, ring, state = given(shape, column, hidden)
        batch, heads, kv_heads, _, size, wide = shape
        tail, decay = None, -torch.rand(batch, kv_heads)
        if kind is not None:
            evicted = query_log_scale = None
            query = token[0]
            if kind == "none":
                evicted = torch.rand(batch, kv_heads, 1, size), torch.randn(batch, kv_heads, 1, wide)
                query, query_log_scale = torch.rand_like(query), torch.randn(batch, heads, 1)
            given_decay = decay[..., None] if column else None
            decay = decay if column else torch.zeros_like(decay)
            tail = window_decode.LinearTail(
                query, evicted, *state, given_decay, None, kind, 0.01, query_log_scale
            )
        compare(token, valid, ring, tail, decay)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("count", [1, 4, 70])
@pytest.mark.parametrize("kind", [None, "elu1", "elu1, a share", "none, a share"])
def test_sinks_are_seen_beside_the_window_and_the_rest_may_have_a_share(kind, count, shape, compiled):
    batch, heads, kv_heads, _, size, wide = shape
    for hidden, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        token, valid, ring, state = given(shape, shape[3] // 2, hidden, dtype)
        tail = None
        if kind is not None:
            evicted = torch.rand(batch, kv_heads, 1, size), torch.randn(batch, kv_heads, 1, wide)
            mapped = "none" not in kind
            tail = window_decode.LinearTail(
                token[0] if mapped else torch.rand(batch, heads, 1, size),
                *(None if mapped else evicted, *state),
                kind=kind.partition(",")[0],
                mix=torch.randn(heads) if "share" in kind else None,
            )
        beside = (heads, 1, size), (kv_heads, count, size), (kv_heads, count, wide)
        sinks = window_decode.Sinks(*(torch.randn(batch, *sizes).to(dtype) for sizes in beside))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        compare(token, valid, ring, tail, torch.zeros(batch, kv_heads), tolerance, sinks)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("hidden", [False, True])
def test_learned_maps_a_logit_of_the_share_and_a_turned_query(shape, hidden, compiled):
    batch, heads, kv_heads, _, size, wide = shape
    token, valid, ring, _ = given(shape, shape[3] // 2, hidden)
    make = torch.Generator().manual_seed(1)
    maps = [torch.randn(count, size, size, generator=make) for count in (heads, kv_heads)]

    def features(x, weight):
        y = torch.einsum("bhnd,hfd->bhnf", x.double(), weight.double())
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1).clamp_min(1e-3)

    rows, column = torch.arange(batch), ring.head_index
    oldest = ring.key[rows, :, column][:, :, None], ring.value[rows, :, column][:, :, None]
    state = torch.rand(batch, kv_heads, 2 * size, wide), torch.rand(batch, kv_heads, 2 * size) + 1
    logit = torch.randn(heads)
    cos, sin = torch.randn(2, batch, size // 4 * 2, generator=make)
    beside = [torch.randn(batch, *each) for each in ((kv_heads, 3, size), (kv_heads, 3, wide))]
    sinks = window_decode.Sinks(token[0], *beside, turn=(cos, sin))
    turned, rest = token[0][..., : cos.shape[1]], token[0][..., cos.shape[1] :]
    half = torch.cat([-turned.chunk(2, -1)[1], turned.chunk(2, -1)[0]], -1)
    met = torch.cat([turned * cos[:, None, None] + half * sin[:, None, None], rest], -1)
    mapped = window_decode.LinearTail(
        features(token[0], maps[0]), (features(oldest[0], maps[1]), oldest[1]), *state, mix=logit.sigmoid()
    )
    decay = torch.zeros(batch, kv_heads)
    want = definition(token, valid, ring, 0.3, mapped, decay, (met, *beside))
    tail = window_decode.LinearTail(
        token[0], None, *state, eps=1e-3, mix=logit, mix_logit=True, learned=tuple(maps)
    )
    got = window_decode.decode(*token, valid, ring, 0.3, tail, sinks)
    assert relative_error(got.double(), want[0]) < 1e-5
    assert relative_error(tail.S.double(), want[1]) < 1e-5
    assert relative_error(tail.z.double(), want[2]) < 1e-5


def test_a_share_of_nothing_is_all_of_the_window(compiled):
    token, _, ring, state = given((2, 4, 2, 9, 16, 24), 3, False)
    ring.valid.fill_(False)
    tail = window_decode.LinearTail(token[0], None, *map(torch.zeros_like, state), kind="elu1")
    mixed = tail._replace(mix=torch.full((4,), 0.3))
    outputs = [
        window_decode.decode(*token, None, window_decode.RingBuffer(*map(torch.clone, ring)), 0.3, each)
        for each in (None, mixed)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)], ids=str)
def test_half_precision_is_summed_in_float32(dtype, tolerance, compiled):
    token, valid, ring, state = given((2, 4, 2, 70, 16, 24), 3, True, dtype)
    tail = window_decode.LinearTail(token[0], None, *state, kind="elu1")
    compare(token, valid, ring, tail, torch.zeros(2, 2), tolerance)


def test_a_gate_makes_the_decay(compiled):
    token, valid, ring, state = given((2, 4, 2, 9, 16, 24), 3, True)
    gate = Gate(torch.randn(2, 24), torch.randn(2), 4.0)
    evicted = ring.value[torch.arange(2), :, ring.head_index]
    logit = torch.einsum("bhe,he->bh", evicted, gate.weight) + gate.bias
    tail = window_decode.LinearTail(token[0], None, *state, gate=gate, kind="elu1")
    compare(token, valid, ring, tail, torch.nn.functional.logsigmoid(logit) / 4)


def test_queries_far_below_zero_and_numbers_far_apart_are_joined(compiled):
    for shift in (-200.0, -6.0, 0.0, 80.0):  # of -6, with its scores, both parts have a share
        (query, key, value), valid, ring, state = given((1, 2, 2, 9, 16, 24), 3, False)
        query = query + shift
        if abs(shift) < 10:
            ring, key = ring._replace(key=ring.key / 50), key / 50
            state = [x * 1000 for x in state]
        tail = window_decode.LinearTail(query, None, *state, kind="elu1")
        compare((query, key, value), valid, ring, tail, torch.zeros(1, 2), 1e-4)


def test_what_is_no_number_is_not_hidden_and_padding_may_be_none(compiled):
    (query, key, value), _, ring, state = given((3, 2, 2, 9, 16, 24), 3, False)
    query[0, 1, 0, 2] = key[1] = torch.nan
    valid = torch.tensor([[True], [False], [True]])
    tail = window_decode.LinearTail(query, None, *state, kind="elu1")
    output = window_decode.decode(query, key, value, valid, ring, 0.3, tail)
    assert output.isnan().all(-1).flatten().tolist() == [False, True, False, False, False, False]
    assert ring.key.isfinite().all()


def test_threads_change_nothing(compiled):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            token, valid, ring, state = given((2, 4, 2, 70, 16, 24), 3, True)
            tail = window_decode.LinearTail(token[0], None, *state, kind="elu1")
            found.append((window_decode.decode(*token, valid, ring, 0.3, tail), *state, *ring))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["elu1", "none"])
def test_the_kernels_make_the_decay_of_a_gate(kind, packed, compiled):
    exact = random_inputs((2, 4, 2, 150, 24, 10), OpConfig(kind), hidden=True, state=True, packed=packed)
    fewer = Inputs(*(x.detach().float() if x is not None and x.is_floating_point() else x for x in exact))
    gate = Gate(torch.randn(2, 10), torch.randn(2), 2.0)
    logit = torch.einsum("bhne,he->bhn", fewer.value.double(), gate.weight.double())
    decay = torch.nn.functional.logsigmoid(logit + gate.bias.double()[:, None]) / 2
    want = sums_of(exact._replace(log_decay=decay.masked_fill(~exact.valid[:, None], 0)), OpConfig(kind))
    got = linear.forward(fewer, OpConfig(kind), True, 64, gate)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a.double(), b.nan_to_num(0)) < 1e-5


SPECS = {
    "window": {},
    "window+elu1": {},
    "window+logn": {},
    "window+gated": {},
    "window+hedgehog": {},
    "window+decay": {},
    "elu1": {},
    "gated": {},
    "hybrid of gated features": {"gated": {"feature_map": "hedgehog", "half_life": 8.0}},
    "hybrid of taylor": {"taylor2": {}},
    "window with sinks": {"window": {"sinks": 3}},
    "window+gated with sinks": {"window": {"sinks": 1}},
    "window+elu1 with sinks where they are": {"window": {"sinks": 3, "positions": "text"}},
    "window+hedgehog with sinks and a share": {"window": {"sinks": 3, "mix": "learned"}},
    "window+elu1 with an interpolated share": {"window": {"mix": "interpolated"}},
    "gated features": {"gated": {"feature_map": "hedgehog", "half_life": 8.0}},
}


def patched(spec, dtype):
    options = {name: dict(part) for name, part in SPECS[spec].items()}
    spec = spec.partition(" with ")[0]
    if "features" in spec or "taylor" in spec:
        spec = ("window+" if "hybrid" in spec else "") + next(iter(options))
    if "window" in spec:
        options["window"] = {"size": 5, **options.get("window", {})}
    torch.manual_seed(0)
    model = patch_model(tiny_models.llama(dtype=dtype), spec, options=options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("window.gate"):
                weight.copy_(torch.linspace(-0.5, 0.8, len(weight)))
    return model


def decoded(model, ids, mask):
    """Logits of tokens one by one behind eight; left-padded."""
    logits, cache = [], None
    with torch.no_grad():
        for start, end in ((0, 8), *((i, i + 1) for i in range(8, ids.shape[1]))):
            places = tiny_models.positions(mask[:, :end])[:, start:]
            given = {"position_ids": places, "past_key_values": cache, "use_cache": True}
            out = model(ids[:, start:end], attention_mask=mask[:, :end], **given)
            cache = out.past_key_values
            logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


def counted(monkeypatch):
    """Names of the calls that tokens are computed by: prepared ones by `run`."""
    called = []
    for owner, name in ((window_decode, "decode"), (window_decode.Prepared, "run"), (linear.Prepared, "run")):
        real = getattr(owner, name)

        def spy(*given, real=real, name=name):
            output = real(*given)
            called.extend([name] * (output is not None))
            return output

        monkeypatch.setattr(owner, name, spy)
    return called


@pytest.mark.parametrize("padding", rest_full([0, 3], [3]))
@pytest.mark.parametrize("spec", SPECS)
def test_models_decode_as_they_do_in_float64(spec, padding, compiled, monkeypatch):
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 30), padding)
    want = decoded(patched(spec, torch.float64), ids, mask)
    called = counted(monkeypatch)
    got = decoded(patched(spec, torch.float32), ids, mask)
    assert relative_error(got.double(), want) < 1e-4
    one_call = "window" in spec or "hybrid" in spec
    again = (one_call or spec in ALONE) and spec not in ("window+logn", "window+decay", "hybrid of taylor")
    assert called.count("run") == (2 * 21 if again and not padding else 0)
    assert len(called) == (2 * 22 if one_call else called.count("run"))


HYBRID = "window+hedgehog with sinks and a share"
ALONE = ("elu1", "gated")


def begun(dtype=torch.float32, spec=HYBRID):
    """A patched model, a cache behind 12 tokens and three decoded ones, and all tokens."""
    model, ids = patched(spec, dtype), tiny_models.tokens(2, 24)
    with torch.no_grad():
        cache = model(ids[:, :12], use_cache=True).past_key_values
        for i in range(12, 15):
            model(ids[:, i : i + 1], past_key_values=cache)
    return model, cache, ids


def change_weights(model, cache):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("key_weight", "window.gate")) or "linattn" in name:
                weight.mul_(0.7)


def replace_weights(model, cache):
    for path, module in model.named_modules():
        name = "weight" if path.endswith(".gated") else "query_weight"
        if hasattr(module, name):
            setattr(module, name, torch.nn.Parameter(0.5 * getattr(module, name).detach()))


def turn_rows(model, cache):
    cache.reorder_cache(torch.tensor([1, 0]))


def half_the_rows(model, cache):
    cache.batch_select_indices(torch.tensor([1]))


CHANGES = [change_weights, replace_weights, turn_rows, half_the_rows, None]


@torch.no_grad()
@pytest.mark.parametrize("spec", [HYBRID, "gated"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x and x.__name__)
def test_prepared_tokens_follow_every_change(change, spec, compiled, monkeypatch):
    """As a cache does whose every token is looked at, in float64: nothing was prepared there."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model, cache, ids = begun(dtype, spec)
        prepared = [layer.prepared for layer in cache.layers]
        assert all(x is None for x in prepared) == (dtype == torch.float64)
        called = counted(monkeypatch)
        if change is not None:
            change(model, cache)
        rows = ids[1:] if change is half_the_rows else ids
        found.append([model(rows[:, i : i + 1], past_key_values=cache).logits for i in range(15, 20)])
        assert called.count("run") == (0 if dtype == torch.float64 else 10 if change is None else 8)
        monkeypatch.undo()
        monkeypatch.setenv(build.CPP, "1")
    for got, want in zip(*found, strict=True):
        assert relative_error(got.double(), want) < 1e-4


@pytest.mark.parametrize("spec", [HYBRID, *ALONE])
@torch.no_grad()
def test_a_copy_of_a_cache_goes_on_by_itself(spec, compiled):
    model, cache, ids = begun(spec=spec)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    want = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(15, 20)]
    for each in copies:
        assert all(layer.prepared is None for layer in each.layers)
        got = [model(ids[:, i : i + 1], past_key_values=each).logits for i in range(15, 20)]
        assert torch.equal(torch.cat(got), torch.cat(want))


@torch.no_grad()
def test_a_prepared_token_gives_way(compiled, monkeypatch):
    """To padding, several tokens at once, gradients, and a branch that is switched off."""
    model, cache, ids = begun()
    exact, other, _ = begun(torch.float64)
    called, mask = counted(monkeypatch), torch.ones(2, 16, dtype=torch.long)
    mask[0, -1] = 0
    for each, kept in ((model, cache), (exact, other)):
        each(ids[:, 15:16], attention_mask=mask, past_key_values=kept)
    assert "run" not in called
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    got, want = (
        each(ids[:, 16:17], attention_mask=mask, past_key_values=kept).logits
        for each, kept in ((model, cache), (exact, other))
    )
    assert relative_error(got.double(), want) < 1e-4
    model, cache, ids = begun()
    exact, other, _ = begun(torch.float64)
    called.clear()
    for each in (model, exact):
        for module in each.modules():
            if hasattr(module, "branches"):
                module.branches = "window"
    got, want = (
        each(ids[:, 15:16], past_key_values=kept).logits for each, kept in ((model, cache), (exact, other))
    )
    assert relative_error(got.double(), want) < 1e-4
    with torch.enable_grad():
        assert model(ids[:, 16:17], past_key_values=cache).logits.requires_grad
    assert not called


@torch.no_grad()
def test_learned_maps_of_bfloat16_are_read_as_they_are(compiled):
    ids, mask = tiny_models.tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    model = patched(HYBRID, torch.bfloat16)
    got = decoded(model, ids, mask).double()
    want = decoded(model.double(), ids, mask)
    assert (got - want).norm() < 3e-2 * want.norm()


def test_what_was_before_a_step_stays_where_somebody_may_go_back(compiled):
    model, ids = patched("window+gated", torch.float32), tiny_models.tokens(1, 20)
    with torch.no_grad():
        want = model(ids).logits
        cache = model(ids[:, :12], use_cache=True).past_key_values
        cache.activate_past_recording()
        for token in (50, 60, 70):
            model(torch.tensor([[token]]), past_key_values=cache)
        cache.crop(-3)
        got = [model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(12, 20)]
    assert tiny_models.distance(torch.stack(got, 1), want[:, 12:]) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("spec", ["window+gated", "gated"])
def test_a_compiled_graph_holds_operators_of_torch(spec, compiled):
    model, ids = patched(spec, torch.float32), tiny_models.tokens(1, 24)
    want = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=24)
    model(ids[:, :20], past_key_values=cache)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True)
    for i in range(20, 24):
        got = run(ids[:, i : i + 1], past_key_values=cache).logits[:, 0]
        assert tiny_models.distance(got, want[:, i]) < 1e-4
    torch._dynamo.reset()


@torch.no_grad()
def test_a_batch_of_nobody_goes_to_torch(compiled):
    (query, key, value), _, ring, _ = given((1, 2, 2, 9, 16, 24), 3, False)
    tokens = Tokens(query[:0], key[:0], value[:0], 0.3, in_place=True)
    nothing = query.new_empty(0, 0)
    state = WindowState(
        *(x[:0] for x in ring[:3]), *(x[:0, :0] for x in ring[:3]), ring.head_index[:0], *2 * [nothing]
    )
    assert fused_step(None, tokens, state) is None
