"""What the Triton kernels must do, run in Triton's interpreter against float64 definitions.

Plain functions: `test_triton.py` calls them in a process of their own, for triton must learn before its first
import that it interprets, and the rest of the suite must not see that.
"""

from typing import NamedTuple

import pytest
import torch

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import linear_attention
from hf_linattn.ops.eager.chunked_backward import of_state_after
from hf_linattn.ops.triton import launch, launcher, measured_tiles, plan, problem
from hf_linattn.ops.triton.tiles import Tile
from hf_linattn.ops.types import Inputs as Operands
from hf_linattn.ops.types import OpConfig, OutputGrads, Outputs

from . import definitions


class Case(NamedTuple):
    """One call; `segment` 0 leaves the choice to the launcher, `keys` 0 is as many as queries."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    length: int = 50
    D: int = 16
    Dv: int = 16
    feature_map: str = "elu1"
    normalise: bool = True
    state: bool = False
    masked: bool = False
    strided: bool = False
    segment: int = 32
    dtype: str = "float32"
    tolerance: float = 3e-6
    causal: bool = True
    keys: int = 0
    mean: float = 0.0
    eps: float = 0.0
    scale: float = 1.0
    decay: float = 0.0
    documents: tuple[int, ...] = ()
    d_after: bool = True


class Inputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    valid: torch.Tensor | None
    S0: torch.Tensor | None
    z0: torch.Tensor | None
    log_decay: torch.Tensor | None = None
    documents: torch.Tensor | None = None


def inputs_of(case):
    """Random ones; behind the mask there is NaN."""
    generator = torch.Generator().manual_seed(len(repr(case)))
    batch, keys = case.batch, case.keys or case.length

    def new(*shape, positive=False):
        x = torch.randn(shape, generator=generator)
        return x.abs() if positive else x

    sizes = (case.heads, case.length, case.D), (case.kv_heads, keys, case.D), (case.kv_heads, keys, case.Dv)
    # features of any sign have totals around 0, where no precision is enough
    signs = (case.feature_map == "none", case.feature_map == "none", False)
    query, key, value = (new(batch, *size, positive=sign) for size, sign in zip(sizes, signs, strict=True))
    query, key, value = query + case.mean, key + case.mean * (case.scale > 1), value * case.scale
    valid = None
    if case.masked:
        valid = torch.rand(batch, keys, generator=generator) > 0.3
        valid[0, : keys // 3] = False
        hidden = ~valid[:, None, :, None]
        key, value = key.masked_fill(hidden, float("nan")), value.masked_fill(hidden, float("nan"))
    query, key, value = (x.to(getattr(torch, case.dtype)) for x in (query, key, value))
    if case.strided:
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    S0 = new(batch, case.kv_heads, case.D, case.Dv) if case.state else None
    z0 = new(batch, case.kv_heads, case.D, positive=True) * 5 if case.state else None
    log_decay = -case.decay * new(batch, case.kv_heads, keys).abs() if case.decay else None
    documents = None
    if case.documents:  # first tokens, those of the second row three later
        first = torch.tensor(case.documents) + 3 * torch.arange(batch)[:, None]
        documents = (torch.arange(keys)[:, None] >= first[:, None]).sum(-1) + 1
    return Inputs(query, key, value, valid, S0, z0, log_decay, documents)


def definition(inputs, case):
    """Output, total, S and z in float64, with the gradients of torch."""
    query, key, value, valid, S0, z0, log_decay, documents = inputs
    return definitions.linear(
        definitions.feature_map(query, case.feature_map, True, case.eps),
        definitions.feature_map(key, case.feature_map, False, case.eps),
        value,
        causal=case.causal,
        normalise=case.normalise,
        hidden=None if valid is None else ~valid,
        S=S0,
        z=z0,
        log_decay=log_decay,
        documents=documents,
    )


def run(case, inputs, segment=None, call=None):
    call = call or (launch.forward if case.causal else launch.global_forward)
    options = {"eps": case.eps, "segment": segment or case.segment or None}
    if case.causal:
        options |= {"log_decay": inputs.log_decay, "documents": inputs.documents}
    return call(*inputs[:6], case.feature_map, case.normalise, **options)


def run_backward(case, inputs, after, gradients, segment=None, segments=None):
    query, key, value, valid, S0, z0, log_decay, documents = inputs
    output, total, S, z = after
    options = {"eps": case.eps, "segment": segment or case.segment or None}
    maps = case.feature_map, case.normalise
    if case.causal:
        options |= {"log_decay": log_decay, "documents": documents, "segments": segments}
        options["last"] = of_state_after(Outputs(*after), OutputGrads(*gradients))
        return launch.backward(*gradients, query, key, value, valid, S0, z0, output, total, *maps, **options)
    return launch.global_backward(*gradients, query, key, value, valid, output, total, S, z, *maps, **options)


def close(got, want, tolerance, what):
    """Relative error of the whole; NaN fails."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
    assert error < tolerance, (what, error)


def check(case):
    """Forward and backward against the definition and its gradient."""
    inputs = inputs_of(case)
    kept = [None if x is None else x.clone() for x in inputs]
    exact = [x if x is None or not x.is_floating_point() else x.double().requires_grad_() for x in inputs]
    if case.masked:  # where torch.where cannot keep NaN out of torch's own gradient
        exact[1], exact[2] = (x.detach().nan_to_num(0.0).requires_grad_() for x in exact[1:3])
    want = definition(exact, case)
    got = run(case, inputs)
    assert got[0].dtype is inputs.value.dtype
    assert got[0].transpose(1, 2).is_contiguous()
    assert all(x.dtype is torch.float32 for x in got[1:])
    for name, a, b in zip(("output", "total", "S", "z"), got, want, strict=True):
        close(a, b.detach(), case.tolerance, name)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in want]
    used = slice(None) if case.d_after else slice(1)
    loss = sum((x * w).sum() for x, w in zip(want[used], weights[used], strict=True))
    of = [x for x in exact if x is not None and x.is_floating_point()]
    expected = torch.autograd.grad(loss, of)
    seeds = [w.float() if case.d_after or i == 0 else None for i, w in enumerate(weights)]
    seeds[0] = seeds[0].to(inputs.value.dtype)
    found = run_backward(case, inputs, got, seeds)
    if case.causal:  # what the forward knows of its segments is what the backward would compute again
        size = case.segment or 32
        _, segments = run(case, inputs, size, launch.forward_and_segments)
        ways = (run_backward(case, inputs, got, seeds, size, x) for x in (segments, None))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*ways, strict=True))
    names = ("query", "key", "value", "S0", "z0", "log_decay")
    given = [(name, x) for name, x in zip(names, found, strict=True) if x is not None]
    for (name, a), b in zip(given, expected, strict=case.causal):
        close(a, b, case.tolerance * 3, f"gradient of {name}")
    for x, of_x in zip(inputs[:3], found[:3], strict=True):
        assert of_x.dtype is x.dtype
    if case.causal and not case.state:
        assert found.S is found.z is None
    for before, x in zip(kept, inputs, strict=True):
        assert before is None or torch.equal(before.nan_to_num(7.0), x.nan_to_num(7.0)), (
            "an input was written to"
        )


def check_rows_without_keys():
    """They give 0, no NaN, and no gradient; later rows are as if the hidden keys were not there."""
    case = Case(batch=2)
    inputs = inputs_of(case)
    valid = torch.ones(2, case.length, dtype=torch.bool)
    valid[0, :40], valid[1] = False, False
    inputs = inputs._replace(valid=valid)
    output, total, S, _ = after = run(case, inputs)
    assert not output[0, :, :40].any()
    assert not output[1].any()
    assert not total[1].any()
    assert not S[1].any()
    assert torch.isfinite(output).all()
    assert output[0, :, 40:].all()
    d_output = torch.ones_like(output)
    found = run_backward(case, inputs, after, (d_output, None, None, None))
    assert all(torch.isfinite(x).all() and not x[1].any() for x in found[:3])
    assert not found.query[0, :, :40].any()
    assert not found.key[0, :, :40].any()
    alone = Inputs(*(x[:1, :, 40:] for x in inputs[:3]), None, None, None)
    close(output[:1, :, 40:], run(case, alone)[0].double(), 1e-6, "output behind the hidden keys")


def check_blocks_of_128_columns():
    """Where a program answers for more than 64 columns, products have another order."""
    tile = Tile(32, 128, 1, 1)
    walks = ("outputs", "query_gradients", "key_gradients", "value_gradients")
    small = Case(D=72, Dv=72, length=40, heads=1, kv_heads=1, state=True)
    with measured_tiles.trial(dict.fromkeys(walks, tile)):
        check(small)
        check(small._replace(decay=0.2, documents=(10, 33), masked=True, heads=2, tolerance=1e-5))
        check(small._replace(causal=False, feature_map="relu"))
        check(small._replace(dtype="bfloat16", tolerance=1e-2))


def check_pairs_of_bfloat16():
    """What is PTX for CUDA: conversions, and the order of tokens; in tiles of both orders of products."""
    from . import triton_ptx

    walks = ("outputs", "query_gradients", "key_gradients", "value_gradients")
    case = Case(D=24, Dv=24, length=40, dtype="bfloat16", tolerance=1e-2, kv_heads=1, state=True)
    for major in (8, 9):
        with triton_ptx.in_pairs(major):
            check(case)
    with triton_ptx.in_pairs(9):
        check(case._replace(masked=True, feature_map="relu", eps=0.1))
        check(case._replace(decay=0.1, documents=(20,), tolerance=1.5e-2))
        check(case._replace(feature_map="none"))
        with measured_tiles.trial(dict.fromkeys(walks, Tile(32, 128, 1, 1))):
            check(case._replace(D=72, Dv=72, heads=1))


def check_same_bits():
    """Twice the same, whatever the memory held before; and other segments change only rounding."""
    case = Case(kv_heads=1, state=True, masked=True)
    inputs = inputs_of(case)
    results = []
    for segment in (32, 32, 64):
        after = run(case, inputs, segment)
        seeds = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in after]
        results.append([*after, *run_backward(case, inputs, after, seeds, segment)[:5]])
        del after, seeds
        torch.full((1 << 16,), float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    for others in results[2:]:
        for i, (a, b) in enumerate(zip(results[0], others, strict=True)):
            close(b, a.double(), 2e-6, f"result {i}")


def check_one_shape_in_several_layouts():
    """What calls of one layout share is not taken for another: the same numbers give the same bits."""
    case = Case(kv_heads=1, masked=True, length=40)
    inputs, results = inputs_of(case), []
    for lay in (
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    ):
        query, key, value = map(lay, inputs[:3])
        valid = lay(inputs.valid[:, None, :, None].expand(-1, -1, -1, 2))[:, 0, :, 0]
        given = inputs._replace(query=query, key=key, value=value, valid=valid)
        after = run(case, given)
        seeds = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in after]
        seeds[0] = lay(seeds[0])
        results.append([*after, *run_backward(case, given, after, seeds)[:3]])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def sums_on_a_device(patch, processors):
    """Let calls be cut for so many processors, and list what `Problem.states` is asked for from now on."""
    seen, states = [], problem.Problem.states

    def counted(self, segment, slots):
        seen.append((segment, slots))
        return states(self, segment, slots)

    patch.setattr(problem.Problem, "states", counted)
    patch.setattr(plan, "device_of", lambda device: plan.Device((9, 0), processors))
    return seen


def check_segments_in_parts():
    """Where key heads are few, a segment is summed up in parts, one slot each, or all slots to one state."""
    case = Case(heads=4, kv_heads=1, length=150, segment=64, masked=True, state=True)
    with pytest.MonkeyPatch.context() as patch:
        seen = sums_on_a_device(patch, 32)
        check(case)
        check(case._replace(decay=0.1, documents=(0, 70, 100), tolerance=1e-5))
        patch.setattr(problem, "DIRECT", 0)
        check(case)
    assert set(seen) == {(32, 4)}


def check_decode(case):
    """Token by token as at once, from the state of a prefill, which stays as it was."""
    inputs = inputs_of(case)
    query, key, value, valid = inputs[:4]
    want, _, S_end, z_end = run(case, inputs)

    def part(first, last):
        own = None if valid is None else valid[:, first:last]
        return *(x[:, :, first:last] for x in (query, key, value)), own

    def links(first, last):
        decay = inputs.log_decay
        return {"log_decay": None if decay is None else decay[:, :, first:last]}

    options = case.feature_map, case.normalise
    first, _, S, z = launch.forward(*part(0, 40), None, None, *options, **links(0, 40))
    outputs = [first]
    for i in range(40, case.length):
        before = S.clone(), z.clone()
        output, new_S, new_z = launch.decode(*part(i, i + 1), S, z, *options, **links(i, i + 1))
        assert torch.equal(before[0], S)
        assert torch.equal(before[1], z)
        over = S.clone(), z.clone()
        again = launch.decode(*part(i, i + 1), *over, *options, in_place=True, **links(i, i + 1))
        assert again[1] is over[0]
        assert again[2] is over[1]
        assert all(torch.equal(a, b) for a, b in zip(again, (output, new_S, new_z), strict=True))
        outputs.append(output)
        S, z = new_S, new_z
    close(torch.cat(outputs, 2), want.double(), case.tolerance, "outputs")
    close(S, S_end.double(), 1e-6, "S")
    close(z, z_end.double(), 1e-6, "z")
    empty = launch.decode(*part(0, 1), None, None, *options)
    alone = launch.forward(*part(0, 1), None, None, *options)
    assert torch.equal(empty[0], alone[0])
    assert torch.equal(empty[1], alone[2])


def check_no_tokens():
    """An empty call hands the state on, in memory of its own."""
    case = Case(length=0, state=True)
    inputs = inputs_of(case)
    for causal in (True, False):
        here = case._replace(causal=causal)
        output, total, S, z = after = run(here, inputs)
        assert output.shape == (1, 2, 0, 16)
        assert total.shape == (1, 2, 0)
        assert torch.equal(S, inputs.S0)
        assert S.data_ptr() != inputs.S0.data_ptr()
        assert torch.equal(z, inputs.z0)
        found = run_backward(here, inputs, after, (output, None, torch.ones_like(S), None))
        assert found.query.shape == inputs.query.shape
        assert bool((found.S == 1).all())
        assert not found.z.any()


def check_nan_is_not_swallowed():
    """A NaN that nothing hides reaches every output behind it."""
    case = Case()
    inputs = inputs_of(case)
    for feature_map in ("elu1", "relu", "none"):
        key = inputs.key.clone()
        key[0, 0, 20, 3] = float("nan")
        output = run(case._replace(feature_map=feature_map), inputs._replace(key=key))[0]
        assert output[0, 0, 20:].isnan().all()
        assert not output[0, 0, :20].isnan().any()
        assert not output[0, 1].isnan().any()


def check_addresses_behind_two_to_the_31():
    """Tokens so far apart that 32 bits cannot count what is between them; pages between stay unused."""
    case = Case(heads=1, kv_heads=1, length=4, dtype="bfloat16", tolerance=1e-2)
    inputs, apart = inputs_of(case), 1 << 30
    room = torch.empty(3 * apart + case.D, dtype=torch.bfloat16)
    far = room.as_strided((1, 1, 4, case.D), (0, 0, apart, 1))
    far.copy_(inputs.key)
    after, want = (run(case, inputs._replace(key=key)) for key in (far, inputs.key))
    seeds = [torch.ones_like(x) for x in want]
    found, wanted = (run_backward(case, inputs._replace(key=key), want, seeds) for key in (far, inputs.key))
    assert all(torch.equal(a, b) for a, b in zip((*after, *found[:3]), (*want, *wanted[:3]), strict=True))


def check_refusals():
    """What the kernels do not take is said."""
    for change in ({"D": 300}, {"Dv": 300}, {"dtype": "float64"}):
        case = Case(**change)
        with pytest.raises(UnsupportedCallError, match="Triton"):
            run(case, inputs_of(case))
    assert plan.refusal((torch.float32,) * 3, (16, 16), 2**24, 1)
    assert plan.refusal((torch.float32,) * 3, (16, 256), 1, 2**24)
    assert launch.available("cpu")
    assert launch.available("cuda")
    assert not launch.available("meta")


def check_the_operator():
    """`ops.kernels` with the Triton form, beside its loop: outputs and gradients."""
    case = Case(kv_heads=1, heads=2, state=True, masked=True, length=40)
    runs = []
    for backend in ("triton", "eager"):
        given = inputs_of(case)
        query, key, value, S, z = (
            x.detach().clone().requires_grad_() for x in (*given[:3], given.S0, given.z0)
        )
        operands = Operands(query, key, value, given.valid, S, z)
        found = linear_attention.attention(operands, OpConfig("elu1"), True, backend)
        loss = found.output.square().sum() + found.S.sum() + found.z.square().sum()
        runs.append((*found, *torch.autograd.grad(loss, (query, key, value, S, z))))
    assert_near(*runs)


def check_what_a_training_step_launches():
    """States before segments are computed once; the weighed features lie where the gradient of q will."""
    names, given = [], inputs_of(Case(length=40, dtype="bfloat16"))
    operands = Operands(*(x.detach().requires_grad_() for x in given[:3]))
    plain = launcher.compile_kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "segment_length", lambda *sizes: 32)

        def counted(kernel, *arguments, **options):
            names.append(kernel.__name__)
            return plain(kernel, *arguments, **options)

        patch.setattr(launcher, "compile_kernel", counted)
        output = linear_attention.attention(operands, OpConfig("elu1"), False, "triton").output
        assert names == ["segment_states", "outputs"]
        names.clear()
        torch.autograd.grad(output.float().square().sum(), operands[:3])
    assert names == ["gradient_rows", "value_gradients", "key_gradients", "query_gradients"]


def check_a_token_is_written_over():
    """One program with all columns writes z over itself; where several share z, it is copied behind them."""
    inputs = inputs_of(Case(length=1, D=32, Dv=32))
    S, z = torch.rand(1, 2, 32, 32), torch.rand(1, 2, 32)
    found, run = [], problem.Launches.launch
    for block in (32, 16):
        state = S.clone(), z.clone()

        def launched(self, kernel, grid, tile, own, walk=None, state=state):
            assert own["S"] is state[0]
            assert (own["Z"] is state[1]) == (tile.block == 32)
            run(self, kernel, grid, tile, own, walk)

        with measured_tiles.trial({"step": Tile(1, block, 4, 1)}), pytest.MonkeyPatch.context() as patch:
            patch.setattr(problem.Launches, "launch", launched)
            output, *after = launch.decode(*inputs[:4], *state, "elu1", in_place=True)
        assert all(x is y for x, y in zip(after, state, strict=True))
        found.append((output, *state))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(found[0][1], S)
    assert not torch.equal(found[0][2], z)


def check_the_operator_over_all_keys():
    """The same, with fewer queries than keys."""
    case = Case(kv_heads=1, heads=2, masked=True, length=30, keys=40, causal=False)
    runs = []
    for backend in ("triton", "eager"):
        given = inputs_of(case)
        query, key, value = (x.detach().clone().requires_grad_() for x in given[:3])
        operands = Operands(query, key, value, given.valid)
        found = linear_attention.attention(operands, OpConfig("elu1", causal=False), False, backend)
        loss = found.output.square().sum()
        runs.append((*found[:2], *torch.autograd.grad(loss, (query, key, value))))
    assert_near(*runs)


def assert_near(found, wanted, tolerance=1e-5):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert float(((got - want).norm() / want.norm().clamp_min(1e-6)).detach()) < tolerance
