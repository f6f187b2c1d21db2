"""Parts of the benchmark: what is timed computes what it says; ratios and break-even lengths."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hf_linattn.attention.cache import StateLayer
from hf_linattn.errors import OptionError, UnknownPatchError
from hf_linattn.eval.bench import config as bench_config
from hf_linattn.eval.bench import memory, peers, roofline
from hf_linattn.eval.bench.break_even import break_even
from hf_linattn.eval.bench.caches import Growth
from hf_linattn.eval.bench.candidates import IN_PLACE, SDPA, build, check, put_back, random_inputs
from hf_linattn.eval.bench.config import KINDS, BenchConfig, Shape, parse_shape, parse_shapes
from hf_linattn.eval.bench.forecast import Forecast
from hf_linattn.eval.bench.model import first_smaller
from hf_linattn.eval.bench.operator import OperatorSeries
from hf_linattn.eval.bench.series import Limits
from hf_linattn.eval.bench.timing import Clock, Timed, TimeSample, measure

SHAPE = parse_shape("2x4/2x8x6")


def oracle(config, tensors, phi=None):
    """N x N attention in float64, `[B, N, H, Dv]`."""
    query, key, value = tensors.query.double(), tensors.key.double(), tensors.value.double()
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    weights = scores.exp() if phi is None else phi(query) @ phi(key).mT
    weights = weights.tril() if config.causal else weights
    return (weights / weights.sum(-1, keepdim=True) @ value).transpose(1, 2)


def elu1(x):
    return F.elu(x) + 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["prefill", "train"])
def test_candidates_compute_attention(kind, causal):
    config = BenchConfig(SHAPE, kind, 70, causal, "float64")
    tensors = random_inputs(config)
    reference, patched = build(config, ["elu1"])
    assert (reference.name, patched.name) == (SDPA, "elu1")
    assert (reference.linear, patched.linear) == (False, True)
    torch.testing.assert_close(reference.call(), oracle(config, tensors).detach())
    torch.testing.assert_close(patched.call(), oracle(config, tensors, elu1).detach())


def test_a_decoded_token_is_the_last_of_a_prefill_however_often():
    config = BenchConfig(SHAPE, "decode", 33, True, "float64")
    tensors = random_inputs(config)
    assert tensors.query.shape[2] == 34
    candidates = {each.name: each for each in build(config, ["elu1", "softmax1", "window+elu1"])}
    assert list(candidates) == [SDPA, IN_PLACE, "elu1", "softmax1", "window+elu1"]
    for name, phi in ((SDPA, None), (IN_PLACE, None), ("elu1", elu1)):
        want = oracle(config, tensors, phi)[:, -1:]
        for _ in range(3):  # the cache is put back
            with candidates[name].around():
                torch.testing.assert_close(candidates[name].call(), want)
    hybrid = candidates["window+elu1"]
    with hybrid.around():
        first = hybrid.call()
        hybrid.call()
    with hybrid.around():
        assert torch.equal(first, hybrid.call())


def test_what_a_first_token_finds_out_stays_for_the_next():
    layer = StateLayer()
    layer.state, layer.seen = (torch.zeros(2),), 8
    references, numbers = put_back(SimpleNamespace(layers=[layer]))
    layer.state[0].add_(1)
    layer.seen, layer.prepared = 9, "found"
    references()
    numbers()
    assert (layer.seen, layer.prepared, layer.state[0].sum()) == (8, "found", 0)


def test_training_has_gradients_of_inputs_and_of_learned_maps(monkeypatch):
    asked, real = [], torch.autograd.grad

    def grad(*args, **options):
        asked.append(real(*args, **options))
        return asked[-1]

    monkeypatch.setattr(torch.autograd, "grad", grad)
    build(BenchConfig(SHAPE, "train", 16), ["hedgehog"])[-1].call()
    assert len(asked[0]) > 3
    assert all(x is not None and x.abs().sum() > 0 for x in asked[0])


def test_inputs_are_the_same_for_all_kinds():
    first, again = (random_inputs(BenchConfig(SHAPE, "prefill", 9)) for _ in range(2))
    assert torch.equal(first.query, again.query)
    assert first.value.shape == (2, 2, 9, 6)
    assert random_inputs(BenchConfig(SHAPE, "train", 9)).key.requires_grad


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1x8x64", Shape(1, 8, 8, 64, 64)),
        ("2x32/8x128", Shape(2, 32, 8, 128, 128)),
        ("1x4/1x16x24", Shape(1, 4, 1, 16, 24)),
    ],
)
def test_shapes_are_read_as_they_are_written(text, shape):
    assert parse_shape(text) == shape
    assert str(shape) == text
    assert parse_shapes(f"{text}, {text}") == [shape]


def test_patches_of_the_other_direction_and_unknown_ones_are_refused():
    with pytest.raises(OptionError, match=r"bidirectional only .* add --bidirectional"):
        check(["linformer"], {}, causal=True)
    with pytest.raises(OptionError, match=r"causal only .* leave --bidirectional out"):
        check(["decay"], {}, causal=False)
    with pytest.raises(UnknownPatchError, match="elu1"):
        check(["elu"], {}, causal=True)
    with pytest.raises(OptionError, match="size"):
        check(["window"], {"window": {"sise": 3}}, causal=True)


def prefill_series(limits, **options):
    """elu1 compared with softmax in prefill."""
    config = BenchConfig(SHAPE, "prefill", 1)
    return OperatorSeries(config, ["elu1"], {}, limits, roofline.Ceiling(1.0, 1.0), **options)


class Scripted(Clock):
    """Seconds from a list per candidate; the calls name themselves."""

    def __init__(self, script, basis="thread time"):
        self.script, self.basis, self.asked, self.device = script, basis, [], torch.device("cpu")

    def sample(self, call, count=1):
        name = call()
        self.asked.append((name, count))
        return self.script[name].pop(0)


def timed(*names):
    return [Timed(name, lambda name=name: name) for name in names]


def test_ratios_are_within_a_round_and_everybody_goes_first_once():
    # a machine that is slow in the second round; the warm-up is not counted
    clock = Scripted(
        {
            "a": [TimeSample(9, 9), TimeSample(1, 1.0), TimeSample(7, 4.0), TimeSample(1, 1.0)],
            "b": [TimeSample(9, 9), TimeSample(1, 0.5), TimeSample(9, 2.0), TimeSample(1, 0.25)],
        }
    )
    found, slow = measure(timed("a", "b"), clock, rounds=3, least=0.0)
    assert slow == {}
    assert [name for name, _ in clock.asked] == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert (found["b"].speed, found["b"].speed_low, found["b"].speed_high) == (2, 2, 4)
    assert (found["a"].time, found["a"].seconds, found["a"].cpu_seconds) == (1, 1, 1)
    assert found["a"].speed is None


def test_short_calls_are_repeated_and_slow_ones_left_out():
    clock = Scripted(
        {
            "a": [TimeSample(9, 0.004), TimeSample(9, 0.002), TimeSample(9, 0.003), TimeSample(1, 1)],
            "b": [TimeSample(30.0, 30.0)],
        },
    )
    found, slow = measure(timed("a", "b"), clock, rounds=1, least=0.01, budget=20)
    assert clock.asked[-1] == ("a", 5)
    assert found["a"].calls == 5
    assert slow == {"b": 30.0}
    assert "b" not in found


def test_without_its_reference_nothing_has_a_ratio():
    clock = Scripted({"a": [TimeSample(30, 30)], "b": [TimeSample(1, 1), TimeSample(1, 1)]})
    found, slow = measure(timed("a", "b"), clock, rounds=1, least=0, budget=5)
    assert list(slow) == ["a"]
    assert found["b"].speed is None


def test_the_clock_of_one_thread_leaves_sleep_out(monkeypatch):
    import time

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sample = Clock().sample(lambda: time.sleep(0.02), 2)
    assert sample.wall >= 0.02
    assert sample.cpu < 0.01
    assert Clock().compared(sample) == sample.cpu
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert Clock().basis == "wall time"
    assert Clock().compared(sample) == sample.wall


@pytest.mark.parametrize(
    ("points", "tokens", "everywhere"),
    [
        ([(128, 0.5), (512, 2.0)], 256, False),  # halfway in logarithms
        ([(512, 2.0), (128, 0.5)], 256, False),  # in any order
        ([(100, 2.0), (200, 0.5), (400, 2.0)], 283, False),  # the last one counts; 200 sqrt(2)
        ([(100, 1.5), (200, 3.0)], 100, True),
        ([(100, 0.5), (200, 0.9)], None, False),
        ([(100, 0.5), (200, 1.02)], None, False),  # noise
        ([(100, 1.0), (200, 2.0)], 100, False),
        ([(100, 2.0)], 100, True),
    ],
)
def test_break_even_lengths(points, tokens, everywhere):
    found = break_even(points)
    assert (found.tokens, found.everywhere) == (tokens, everywhere)


def test_break_even_in_words():
    assert break_even([]) is None
    assert (
        break_even([(128, 0.5), (512, 2.0)]).describe("decode", "faster")
        == "decode faster from 256 tokens on"
    )
    never = break_even([(128, 0.5), (2048, 0.7)]).describe("decode", "faster")
    assert never == "decode never faster within what was measured (128 to 2,048 tokens)"
    assert "at every length measured, from 128" in break_even([(128, 2.0)]).describe("decode", "faster")


def test_caches_are_compared_by_what_they_are_made_of():
    state, cache, window = Growth(1000, 0, None), Growth(0, 10, None), Growth(0, 10, 50)
    assert first_smaller([state], [cache]).tokens == 101
    assert first_smaller([state], [window]).tokens is None
    found = first_smaller([state], [cache])
    assert found.describe("its cache", "smaller") == "its cache smaller from 101 tokens on"
    assert first_smaller([state], [window]).describe("its cache", "smaller") == "its cache never smaller"


def test_forecasts_follow_the_last_two_lengths():
    forecast = Forecast()
    assert forecast.refusal(10**9, 1.0, "cpu") == ""
    forecast.add(1000, 0.1, 1000)
    assert forecast.seconds(2000) == pytest.approx(0.4)  # nothing known: the square
    forecast.add(2000, 0.2, 1000)
    assert forecast.seconds(8000) == pytest.approx(0.8)
    assert forecast.size(8000) == pytest.approx(1000)
    assert Forecast(True, [(1000, 0.1, 10)]).seconds(4000) == pytest.approx(0.4)
    assert "about 0.8 s (--budget 0.5)" in forecast.refusal(8000, 0.5, "cpu")


def test_a_single_token_says_what_a_call_costs_and_not_how_it_grows():
    forecast = Forecast(points=[(1, 0.01, 1000)])
    assert forecast.seconds(64) == forecast.seconds(256) == pytest.approx(0.01)
    assert forecast.seconds(1024) == pytest.approx(0.16)
    forecast.add(16, 0.02, 1000)
    assert forecast.seconds(1024) == pytest.approx(0.32)


@pytest.mark.skipif(memory.available() is None, reason="this system does not tell its free memory")
def test_forecasts_keep_off_memory_that_is_not_there():
    forecast = Forecast(points=[(512, 1e-9, 2**30), (1024, 1e-9, 2**32)])
    assert "GiB are free" in forecast.refusal(2**20, math.inf, "cpu")


def test_peak_memory_is_what_is_alive_at_once():
    def known():
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first
        return torch.empty(700, 1000), second

    assert memory.peak(known) == 6_000_000
    assert memory.peak(lambda: None) == 0


def test_work_is_what_loops_would_count():
    config = BenchConfig(Shape(2, 4, 2, 8, 6), "prefill", 5)
    reference, patched = build(config, ["elu1"])
    flops = sum(2 * (8 + 6) for _ in range(2 * 4) for i in range(5) for j in range(i + 1))
    numbers = 2 * 5 * (4 * 8 + 2 * 8 + 2 * 6 + 4 * 6)  # q, k, v, o
    assert roofline.count_operations(config, reference.model) == roofline.OperationCount(flops, 4 * numbers)
    count = roofline.count_operations(config, patched.model)
    inside = 2 * 4 * 5 * 5 * (8 + 6)  # half of a chunk of 5, a multiply-add is two
    states = 2 * 5 * (4 + 2) * 2 * 8 * (6 + 1)
    assert count == roofline.OperationCount(inside + states, 4 * numbers)
    train = BenchConfig(config.shape, "train", 5)
    assert roofline.count_operations(train, reference.model).flops == 3 * flops
    decode = BenchConfig(config.shape, "decode", 100)
    assert (
        roofline.count_operations(decode, patched.model).bytes
        < roofline.count_operations(decode, reference.model).bytes
    )
    assert roofline.count_operations(config, build(config, ["relu2"])[-1].model) is None


def test_shares_take_the_harder_bound():
    ceiling = roofline.Ceiling(flops=100.0, bytes=10.0)
    assert roofline.share(roofline.OperationCount(100, 1), 2.0, ceiling) == (0.5, "arithmetic")
    assert roofline.share(roofline.OperationCount(1, 10), 4.0, ceiling) == (0.25, "memory")
    measured = roofline.ceilings("float32", "cpu")
    assert measured.flops > 1e8
    assert measured.bytes > 1e7


def test_what_is_too_slow_or_too_large_has_a_row_that_says_so(monkeypatch):
    series = prefill_series(Limits(rounds=1, least=0.0, budget=100.0))
    rows = series.run(16)
    assert [row["measured"] for row in rows] == [True, True]
    assert rows[1]["speed"] > 0
    assert rows[1]["memory_ratio"] > 0
    assert rows[0]["bound"] in ("arithmetic", "memory")
    series.forecasts[SDPA].points[:] = [(8, 1.0, 10), (16, 600.0, 20)]
    late = {row["candidate"]: row for row in series.run(64)}
    assert "not run: one call would take about" in late[SDPA]["note"]
    assert late["elu1"]["measured"]
    assert late["elu1"]["speed"] is late["elu1"]["memory_ratio"] is None

    def exhausted(call, device):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(memory, "peak", exhausted)
    rows = prefill_series(Limits()).run(16)
    assert {row["note"] for row in rows} == {"not run: out of memory"}


def test_a_series_that_begins_far_out_is_tried_below_first(monkeypatch):
    from hf_linattn.eval.bench import operator, series

    lengths, real = [], operator.entries

    def watched(config, *rest):
        lengths.append(config.length)
        return real(config, *rest)

    monkeypatch.setattr(series, "FIRST", 20)
    monkeypatch.setattr(series, "PROBES", (8, 16))
    monkeypatch.setattr(operator, "entries", watched)
    rows = prefill_series(Limits(1, 0.0)).run(32)
    assert lengths == [8, 16, 32]
    assert {row["length"] for row in rows} == {32}


def test_every_kind_has_a_sentence_and_a_panel():
    from hf_linattn.eval.bench import break_even, plots

    assert set(break_even.KIND_WORDS) == set(plots.KINDS) == set(KINDS)
    assert tuple(peers.PEERS) == bench_config.PEERS
