"""Speed and memory of patched attention against softmax: loose limits on ratios, one thread, any machine.

Thread time, candidates in turn, medians of ratios within a round: a busy machine moves these by some percent.
Each limit leaves a factor of two to what was measured. Numbers: `python -m hf_linattn.bench`.
"""

import pytest
import torch

from hf_linattn.eval.bench import memory
from hf_linattn.eval.bench.candidates import IN_PLACE, SDPA, build
from hf_linattn.eval.bench.config import BenchConfig, parse_shape
from hf_linattn.eval.bench.timing import Clock, Timed, measure

SMALL, LARGE = "1x8x64", "1x32/8x128"
LIMITS = [  # times as fast as SDPA, at least
    ("prefill", SMALL, 4096, {"elu1": 3.3}),
    ("prefill", SMALL, 1024, {"softmax1": 0.45, "logn": 0.45}),
    ("train", SMALL, 2048, {"elu1": 1.8}),
    ("decode", SMALL, 4096, {"elu1": 1.1}),
    ("decode", LARGE, 2048, {"elu1": 2.5}),
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "shape", "length", "limits"), LIMITS, ids=lambda x: str(x)[:12])
def test_speed_beside_sdpa(kind, shape, length, limits):
    candidates = build(BenchConfig(parse_shape(shape), kind, length), list(limits))
    if kind == "decode":  # SDPA over keys that are there: what copying a cache takes depends on the allocator
        candidates = [each for each in candidates if each.name != SDPA]
        assert candidates[0].name == IN_PLACE
    clock = Clock()
    assert clock.basis == "thread time"
    found, _ = measure(candidates, clock, rounds=9 if kind == "decode" else 3)
    slow = {name: found[name] for name, least in limits.items() if found[name].speed < least}
    assert not slow, f"slower than {limits} times SDPA: {slow}"


def test_a_decoded_token_costs_the_same_behind_any_length():
    steps = []
    for length in (64, 8192):
        elu1 = build(BenchConfig(parse_shape(SMALL), "decode", length), ["elu1"])[-1]
        steps.append(Timed(str(length), elu1.call))
    found, _ = measure(steps, Clock(), rounds=9)
    assert found["8192"].speed > 0.5


@pytest.mark.parametrize("kind", ["prefill", "train"])
def test_memory_of_elu1_grows_with_the_length_alone(kind):
    sizes = {}
    for length in (256, 1024):
        candidates = build(BenchConfig(parse_shape(SMALL), kind, length), ["elu1", "relu2"])
        sizes[length] = {each.name: memory.peak(each.call) for each in candidates if each.name != SDPA}
    growth = {name: size / sizes[256][name] for name, size in sizes[1024].items()}
    assert growth["elu1"] < 5  # 4 times the tokens
    assert growth["relu2"] > 10  # what holds all scores: the test can tell


def test_training_takes_little_more_memory_than_its_results():
    candidates = build(
        BenchConfig(parse_shape(SMALL), "train", 4096), ["elu1", "gated", "softmax1", "hedgehog"]
    )
    size = 8 * 4096 * 64 * 4  # of the queries; the output and three gradients are 4 of them
    peaks = {each.name: memory.peak(each.call) / size for each in candidates}
    assert peaks["elu1"] < 4.5
    assert peaks["gated"] < 6
    assert peaks["softmax1"] < 4.5  # 6.1 with copies of the gradient
    assert peaks["hedgehog"] > 9  # its features lie in memory: the test can tell


def test_memory_of_a_decoded_token_does_not_grow():
    sizes = [
        memory.peak(build(BenchConfig(parse_shape(SMALL), "decode", length), ["elu1"])[-1].call)
        for length in (64, 4096)
    ]
    # the mask of the past is a number per token and row
    assert sizes[1] < sizes[0] + 4 * 4096 * 8
