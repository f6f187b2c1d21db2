"""Forms of causal linear attention with a backward of their own, against the formula in float64."""

import itertools

import pytest
import torch
from test_ops import relative_error

from hf_linattn.ops import dispatch, kernels, loop, loop_backward, quadratic
from hf_linattn.ops.chunks import FEATURE_MAPS, How
from hf_linattn.ops.loop import Inputs
from hf_linattn.patches.elu1 import Elu1
from hf_linattn.patches.relu import Relu
from hf_linattn.tokens import Tokens

EPS = 1e-3
SHAPES = {  # rows, heads, key heads, tokens, D, Dv
    "shared keys": (2, 4, 2, 200, 8, 6),
    "short": (2, 6, 2, 33, 5, 4),
    "one chunk and one token": (1, 2, 2, 129, 4, 4),
    "more pairs than go together": (2, 40, 40, 70, 3, 3),
}


def features(query, key, how):
    """The patches' own maps."""
    if how.kind == "elu1":
        return Elu1(None).query_map(query), Elu1(None).key_map(key)
    if how.kind == "relu":
        return Relu(None, eps=how.eps).query_map(query), Relu(None, eps=how.eps).key_map(key)
    return query, key


def definition(inputs, how):
    """All pairs at once: output, total, S, z."""
    query, key = features(inputs.query, inputs.key, how)
    value, hidden, decay, labels = inputs.value, inputs.hidden, inputs.log_decay, inputs.documents
    if hidden is not None:
        key, value = (x.masked_fill(hidden[:, None, :, None], 0) for x in (key, value))
    (batch, kv_heads, length), shared = key.shape[:3], query.shape[1] // key.shape[1]
    ones = torch.ones(batch, kv_heads, length, length, dtype=query.dtype)
    running = torch.zeros(batch, kv_heads, length, dtype=query.dtype) if decay is None else decay.cumsum(-1)
    weight = (ones * (running[..., :, None] - running[..., None, :]).tril().exp()).tril()
    reading, entering = running.exp(), (running[..., -1:] - running).exp()
    if labels is not None:
        weight = weight * (labels[:, None, :, None] == labels[:, None, None, :])
        reading = reading * (labels == labels[:, :1])[:, None]
        entering = entering * (labels == labels[:, -1:])[:, None]
    weight, reading_q = (x.repeat_interleave(shared, 1) for x in (weight, reading))
    scores = query @ key.repeat_interleave(shared, 1).mT * weight
    numerator, total = scores @ value.repeat_interleave(shared, 1), scores.sum(-1)
    entered = key * entering[..., None]
    S, z = entered.mT @ value, entered.sum(2)
    if inputs.S is not None:
        read = query * reading_q[..., None]
        numerator = numerator + read @ inputs.S.repeat_interleave(shared, 1)
        total = total + (read * inputs.z.repeat_interleave(shared, 1)[:, :, None]).sum(-1)
        S, z = S + inputs.S * reading[:, :, -1, None, None], z + inputs.z * reading[:, :, -1, None]
    if how.normalise:
        numerator = numerator / torch.where(total > 0, total, 1)[..., None]
    return numerator, total, S, z


def random_inputs(shape, how, *, hidden=False, state=False, decay=False, packed=False, dense=True, seed=0):
    batch, heads, kv_heads, length, size, wide = shape
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64)

    def tokens(heads, size):
        return (
            normal(batch, heads, length, size)
            if dense
            else normal(batch, length, heads, size).transpose(1, 2)
        )

    query, key, value = tokens(heads, size), tokens(kv_heads, size), tokens(kv_heads, wide)
    if how.kind == "none":
        query, key = query.abs() + 0.1, key.abs() + 0.1
    unseen = torch.rand(batch, length, generator=make) < 0.2 if hidden else None
    if hidden:
        key, value = (x.masked_fill(unseen[:, None, :, None], torch.nan) for x in (key, value))
    labels = (torch.rand(batch, length, generator=make) < 0.03).long().cumsum(1) if packed else None
    S = normal(batch, kv_heads, size, wide).abs() if state else None
    z = normal(batch, kv_heads, size).abs() if state else None
    log_decay = -0.3 * torch.rand(batch, kv_heads, length, generator=make).double() if decay else None
    found = Inputs(query, key, value, unseen, S, z, log_decay, labels)
    return found._replace(
        **{
            name: x.requires_grad_()
            for name, x in found._asdict().items()
            if x is not None and x.is_floating_point()
        }
    )


def every_input(shape, how):
    """With and without padding, a state before, decay and documents; dense and strided."""
    for number, (hidden, state, decay, packed) in enumerate(itertools.product((False, True), repeat=4)):
        yield random_inputs(
            shape, how, hidden=hidden, state=state, decay=decay, packed=packed, dense=number % 2 == 0
        )


def compare(inputs, how, tolerance=1e-11):
    got, want = kernels.attention(inputs, how, keep=True), definition(inputs, how)
    weights = [torch.randn_like(x) for x in want]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    shown = [
        *got,
        *torch.autograd.grad(sum((x * w).sum() for x, w in zip(got, weights, strict=True)), leaves),
    ]
    loss = sum((x * w).sum() for x, w in zip(want, weights, strict=True))
    expected = [*want, *(x.nan_to_num(0) for x in torch.autograd.grad(loss, leaves))]
    for place, (a, b) in enumerate(zip(shown, expected, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < tolerance, place


HOWS = [
    How(kind, EPS if kind == "relu" else 0.0, divide) for kind in FEATURE_MAPS for divide in (True, False)
]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how.kind}-{'output' if how.normalise else 'sums'}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forms_and_their_gradients_are_the_formula(how, shape):
    for given in every_input(shape, how):
        compare(given, how)


def forgetful(state, packed):
    """Chunks that forget all, e^-60 and less, between chunks that forget little, some e^-10."""
    given = random_inputs((2, 4, 2, 400, 24, 16), How("elu1"), decay=True, state=state, packed=packed)
    strong = (torch.arange(400) // 100 % 2).bool()
    with torch.no_grad():
        given.log_decay[..., strong] *= 20
    return given


@pytest.mark.parametrize(("state", "packed"), [*itertools.product((False, True), repeat=2)])
def test_chunks_that_forget_all_and_chunks_that_forget_little_follow_each_other(state, packed):
    compare(forgetful(state, packed), How("elu1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [100, 300])
def test_half_precision_is_summed_in_float32(dtype, length):
    """What is left is the rounding of inputs, output and gradients themselves."""
    exact = random_inputs((2, 4, 2, length, 16, 16), How("elu1"))
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact[:3]]
    exact = Inputs(*(x.detach().double().requires_grad_() for x in rounded))
    weight = torch.randn(2, 4, length, 16, dtype=torch.float64)
    got, want = kernels.attention(Inputs(*rounded), How("elu1"), keep=True), definition(exact, How("elu1"))
    limit = 4 * torch.finfo(dtype).eps
    assert got.output.dtype == dtype
    assert {x.dtype for x in got[1:]} == {torch.float32}
    assert relative_error(got.output, want[0]) < limit
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative_error(a, b) < 1e-5  # sums are not rounded
    found = torch.autograd.grad((got.output * weight.to(dtype)).sum(), rounded)
    expected = torch.autograd.grad((want[0] * weight.to(dtype)).sum(), exact[:3])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < limit


def test_queries_never_underflow_and_no_key_is_no_output():
    query, key, value = (torch.randn(1, 2, 300, 8) for _ in range(3))
    unseen = torch.arange(300)[None] < 20
    got = kernels.attention(Inputs(query - 120, key, value, unseen), How("elu1"), keep=False)
    shifted = (query - 120).double() - (query - 120).double().amax(-1, keepdim=True)
    want = definition(Inputs(shifted, key.double(), value.double(), unseen), How("elu1"))
    assert torch.equal(got.output[:, :, :20], torch.zeros(1, 2, 20, 8))
    assert relative_error(got.output, want[0]) < 1e-5
    assert got.S is got.z is None  # not asked for


@pytest.mark.parametrize("length", [60, 260])
def test_both_forms_twice_are_bit_for_bit_the_same(length):
    given = random_inputs((1, 4, 2, length, 8, 8), How("elu1"))
    given = Inputs(*(x.detach().float().requires_grad_() for x in given[:3]))
    runs = []
    for _ in range(2):
        output = kernels.attention(given, How("elu1"), keep=False).output
        runs.append((output.detach(), *torch.autograd.grad(output.square().sum(), given[:3])))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("hidden", [False, True])
def test_the_quadratic_form_is_the_loop(kind, hidden):
    how = How(kind, EPS)
    given = random_inputs((2, 4, 2, 90, 8, 6), how, hidden=hidden)
    with torch.no_grad():
        short, long = quadratic.forward(given, how, True), loop.causal(given, how, True, 32)
        grads = loop_backward.Given(*(torch.randn_like(x) for x in short))
        by_short = quadratic.backward(given, short, grads, how)
        by_long = loop_backward.backward(given, long, grads, how, 32)
    for a, b in zip([*short, *by_short[:3]], [*long, *by_long[:3]], strict=True):
        assert relative_error(a.nan_to_num(0), b.nan_to_num(0)) < 1e-12


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("length", [6, 200])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_operator_keeps_the_rules_of_torch(length, linked):
    how = How("none")
    given = random_inputs((1, 4, 2, length, 3, 2), how, state=linked, decay=linked, packed=linked)
    given = given._replace(hidden=torch.rand(1, length) < 0.2)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.hf_linattn.linear_attention.default, (*given, *how, True), test_utils=utils
    )


@pytest.mark.parametrize("how", [How("elu1"), How("none", 0.0, False)], ids=str)
def test_gradcheck(how):
    """Totals of elu1 aside: their factor per query divides away, and counts as a constant."""
    for length in (3, 9):
        given = random_inputs((1, 2, 1, length, 2, 2), how, state=True)

        def outputs(query, key, value, S, z):
            found = kernels.attention(Inputs(query, key, value, None, S, z), how, keep=True)
            return tuple(found) if how.kind == "none" else (found.output, found.S, found.z)

        assert torch.autograd.gradcheck(outputs, [x for x in given if x is not None])


def test_gradients_of_gradients_are_refused():
    given = random_inputs((1, 1, 1, 5, 2, 2), How("elu1"))
    output = kernels.attention(given, How("elu1"), keep=False).output
    (grad,) = torch.autograd.grad(output.square().sum(), given.query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_map_made_from_another_is_its_own():
    class Doubled(Elu1):
        def key_map(self, key):
            return 2 * super().key_map(key)

    class Same(Elu1):
        pass

    assert (Elu1.fused, Same.fused, Doubled.fused) == ("elu1", "elu1", "none")


def test_a_denominator_of_its_own_is_used():
    class Halved(Elu1):
        def denominator(self, total, count):
            return 2 * total

    tokens = Tokens(*(torch.randn(1, 2, 40, 8) for _ in range(3)), scaling=1.0)
    assert not Halved.summed
    assert torch.allclose(2 * Halved(None).causal(tokens, None)[0], Elu1(None).causal(tokens, None)[0])


def test_the_rule_is_told():
    text = dispatch.explain()
    assert str(dispatch.SHORT) in text
    assert all(name in text for name in ("quadratic", "loop", "vectorised"))
