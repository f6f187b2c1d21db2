"""generate() in all its modes gives the tokens that full forwards without any cache give."""

import itertools

import pytest
import torch
from helpers.selection import rest_full
from helpers.tiny_models import ENCODER_DECODER_SIZES, build, grow, left_padded, llama, tokens
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

import hf_linattn
from hf_linattn.attention.cache import StateLayer

NEW = 16
PLANS = {
    "elu1": "elu1",
    "softmax1": "softmax1",
    "logn": ("logn", {"train_length": 24}),
    "softmax1+logn": ("softmax1+logn", {"train_length": 24}),
    "elu1, sdpa": {"0": "elu1"},
    "sdpa, elu1": {"1": "elu1"},
    "elu1, softmax1+logn": {"0": "elu1", "1": "softmax1+logn"},
    "elu1, eager": {"0": "elu1"},
    "gated": "gated",
    "window+hedgehog": ("window+hedgehog", {"size": 8, "sinks": 2}),
    "softmax1+fox": ("softmax1+fox", {"half_life": 8.0}),
    "window+elu1, salient": ("window+elu1", {"size": 8, "sinks": 2, "salient": 6}),
}
every_plan = pytest.mark.parametrize("plan", PLANS)
EACH_STATE = ("elu1", "softmax1+logn", "sdpa, elu1", "gated", "window+hedgehog", "softmax1+fox")
EACH_STATE += ("window+elu1, salient",)
"""One plan for every kind of state, with and without keys beside it."""
each_state = pytest.mark.parametrize("plan", rest_full(PLANS, EACH_STATE))


def patched_llama(plan, **config):
    """Float64; float32 beside eager attention, where padded rows of float64 are NaN, patched or not."""
    if plan.endswith("eager"):
        config = {"implementation": "eager", "dtype": torch.float32, **config}
    spec = PLANS[plan]
    spec, options = spec if isinstance(spec, tuple) else (spec, None)
    model = hf_linattn.patch_model(llama(**config), spec, options=options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name:  # gates that are the same for all tokens would hide errors
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def generate(model, ids, mask=None, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, **kwargs)


def grown(model, ids, mask=None, steps=NEW):
    """The oracle; a continuation that repeats one token would prove little."""
    want = grow(model, ids, steps, mask)
    assert len(set(want[:, ids.shape[1] :].flatten().tolist())) > 3
    return want


@pytest.fixture(scope="module")
def prompt():
    return left_padded(tokens(2, 40), 11)


@every_plan
def test_greedy_is_the_argmax_of_full_forwards(plan, prompt):
    model = patched_llama(plan)
    want = grown(model, *prompt)
    assert torch.equal(generate(model, *prompt), want)
    assert torch.equal(generate(model, *prompt, use_cache=False), want)
    alone = generate(model, prompt[0][:1, 11:])
    assert torch.equal(alone[:, 29:], want[:1, 40:]), "a padded row differs from the same row alone"


@each_state
def test_prefill_in_chunks(plan, prompt):
    model = patched_llama(plan)
    assert torch.equal(generate(model, *prompt, prefill_chunk_size=7), grown(model, *prompt))


@each_state
def test_sampling_draws_the_same_tokens_with_and_without_cache(plan, prompt):
    model = patched_llama(plan)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(generate(model, *prompt, do_sample=True, top_k=20, use_cache=use_cache))
    assert torch.equal(*drawn)
    torch.manual_seed(4)
    assert not torch.equal(drawn[0], generate(model, *prompt, do_sample=True, top_k=20))


@each_state
def test_beams_are_those_without_cache(plan, prompt):
    model = patched_llama(plan)
    want = generate(model, *prompt, num_beams=3, use_cache=False)
    assert torch.equal(generate(model, *prompt, num_beams=3), want)
    assert not torch.equal(want, grow(model, *prompt[:1], NEW, prompt[1])), "beams that never matter"
    several = generate(model, *prompt, num_beams=3, num_return_sequences=2)
    assert torch.equal(several[::2], want)


def test_beams_without_reordering_are_noticed(prompt, monkeypatch):
    model = patched_llama("elu1")
    want = generate(model, *prompt, num_beams=3)
    monkeypatch.setattr(StateLayer, "reorder_cache", lambda self, beams: None)
    assert not torch.equal(generate(model, *prompt, num_beams=3), want)


@each_state
def test_static_cache(plan, prompt):
    model = patched_llama(plan)
    want = grown(model, *prompt)
    assert torch.equal(generate(model, *prompt, cache_implementation="static"), want)
    assert torch.equal(generate(model, *prompt, cache_implementation="static", prefill_chunk_size=9), want)


@each_state
def test_second_turn_with_the_cache_of_the_first(plan):
    model = patched_llama(plan)
    ids = tokens(1, 30)
    first = generate(model, ids, max_new_tokens=6, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(1, 10, seed=1)], 1)
    want = grown(model, turn)
    assert torch.equal(generate(model, turn, past_key_values=first.past_key_values), want)
    static = StaticCache(config=model.config, max_cache_len=80)
    generate(model, ids, max_new_tokens=6, past_key_values=static)
    assert torch.equal(generate(model, turn, past_key_values=static), want)


@pytest.fixture
def crops(monkeypatch):
    """Tokens taken back by each call of `crop` on any layer of a cache."""
    taken = []
    for cls in (StateLayer, DynamicLayer):
        original = cls.crop

        def counted(self, count, original=original):
            taken.append(abs(count))
            return original(self, count)

        monkeypatch.setattr(cls, "crop", counted)
    return taken


@each_state
def test_prompt_lookup_takes_candidates_back(plan, crops):
    model = patched_llama(plan)
    ids = grow(model, tokens(1, 24), 24)  # its own text, so that some candidates are accepted
    want = grow(model, ids, 24)
    got = generate(model, ids, prompt_lookup_num_tokens=4, max_new_tokens=24)
    assert torch.equal(got, want)
    assert sum(n > 0 for n in crops) > 2


@each_state
def test_assisted_decoding_takes_candidates_back(plan, crops):
    model, draft = patched_llama(plan), patched_llama(plan)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ids = tokens(1, 24)
    got = generate(model, ids, assistant_model=draft, max_new_tokens=24)
    assert torch.equal(got, grown(model, ids, steps=24))
    assert sum(n > 0 for n in crops) > 2


def test_patched_model_with_unpatched_assistant_and_the_reverse():
    model, other = patched_llama("elu1"), llama()
    ids = tokens(1, 24)
    assert torch.equal(generate(model, ids, assistant_model=other), grown(model, ids))
    assert torch.equal(generate(other, ids, assistant_model=model), grown(other, ids))


def test_candidates_that_are_never_taken_back_are_noticed(monkeypatch):
    model = patched_llama("elu1")
    ids = grow(model, tokens(1, 24), 24)
    want = grow(model, ids, 24)
    original = StateLayer.crop
    monkeypatch.setattr(StateLayer, "crop", lambda self, count: original(self, 0))
    try:
        got = generate(model, ids, prompt_lookup_num_tokens=4, max_new_tokens=24)
    except (RuntimeError, ValueError, IndexError):
        return  # noticed by transformers itself
    assert not torch.equal(got, want)


class Counter:
    """Backend of torch.compile that runs the captured graph as it is and counts."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __deepcopy__(self, memo):  # generate() copies its config
        return self

    def __call__(self, graph, example):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


@pytest.mark.parametrize(
    "plan",
    rest_full(["elu1", "softmax1+logn", "sdpa, elu1", "softmax1+fox"], ["sdpa, elu1", "softmax1+fox"]),
)
def test_compiled_static_cache(plan, prompt):
    torch._dynamo.reset()
    model, counter = patched_llama(plan), Counter()
    config = CompileConfig(fullgraph=True, backend=counter, mode=None)
    config._compile_all_devices = True
    got = generate(model, *prompt, cache_implementation="static", compile_config=config)
    assert torch.equal(got, grown(model, *prompt))
    assert counter.graphs == 1
    assert counter.runs == NEW - 1  # the first token comes from the prefill, which stays eager
    torch._dynamo.reset()


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer_receives_every_token():
    model, streamer = patched_llama("elu1"), Collect()
    out = generate(model, tokens(1, 12), streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist()


def test_memory_does_not_grow_with_the_tokens():
    model = patched_llama("elu1", layers=1, dtype=torch.float32, max_position_embeddings=2048)
    sizes = {}
    for length in (64, 1024):
        prompt = tokens(1, length // 2)
        out = generate(model, prompt, max_new_tokens=length // 2, return_dict_in_generate=True)
        assert out.sequences.shape[1] == length
        layers = out.past_key_values.layers
        assert all(
            isinstance(layer, StateLayer) and layer.seen == length - 1 and not layer.tail for layer in layers
        )
        sizes[length] = [layer.nbytes for layer in layers]
        reachable = [x for layer in layers for x in _tensors(vars(layer))]
        assert sum(x.untyped_storage().nbytes() for x in reachable) == sum(sizes[length])
    assert sizes[64] == sizes[1024] == [2 * 8 * 9 * 4]  # 2 key heads, S [8, 8] and z [8], float32


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return (
        [x for part in value for x in _tensors(part)]
        if hasattr(value, "__iter__") and not isinstance(value, str)
        else []
    )


BART, MARIAN = "BartForConditionalGeneration", "MarianMTModel"


@pytest.mark.parametrize(
    ("family", "plan", "beams"),
    rest_full(
        itertools.product(
            (BART, MARIAN), ("elu1", "softmax1", "logn", "softmax1+logn", "elu1, sdpa"), (1, 3)
        ),
        [
            *((BART, "elu1", 1), (BART, "elu1, sdpa", 3), (BART, "softmax1", 3)),
            *((MARIAN, "elu1", 3), (MARIAN, "logn", 1), (MARIAN, "softmax1+logn", 3)),
        ],
    ),
)
def test_encoder_decoder_is_cached_exactly(family, plan, beams):
    model = build(family, **ENCODER_DECODER_SIZES)
    spec = {"*decoder*self_attn": "elu1"} if plan.endswith("sdpa") else plan
    hf_linattn.patch_model(model, spec)
    source = tokens(2, 20)
    mask = torch.ones_like(source)
    mask[0, 13:] = 0
    for sample in (False, True):
        # greedy, these models repeat themselves, and so do beams of likely tokens
        chosen = {"do_sample": True, "temperature": 3.0} if sample else {}
        outputs = []
        for cached in (True, False):
            torch.manual_seed(0)
            outputs.append(generate(model, source, mask, num_beams=beams, use_cache=cached, **chosen))
        assert torch.equal(*outputs)
    assert len(set(outputs[0].flatten().tolist())) > 10
    if beams == 1:
        greedy = generate(model, source, mask)
        want = torch.full((2, 1), 2)
        with torch.no_grad():
            for _ in range(NEW):
                out = model(source, attention_mask=mask, decoder_input_ids=want, use_cache=False)
                want = torch.cat([want, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(greedy, want)


class Skipped(torch.nn.Module):
    def forward(self, hidden_states, **kwargs):
        return hidden_states


class WithoutAttention(torch.nn.Module):
    def forward(self, hidden_states, **kwargs):
        return torch.zeros_like(hidden_states), None


def take_out(model, layers):
    del layers[1]


def skip(model, layers):
    layers[1] = Skipped()


def knock_out(model, layers):
    layers[1].self_attn = WithoutAttention()


def swap(model, layers):
    layers[0], layers[1] = layers[1], layers[0]


def take_out_and_count(model, layers):
    del layers[0]
    model.config.num_hidden_layers = len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


@pytest.mark.parametrize("operate", [take_out, skip, knock_out, swap, take_out_and_count])
@pytest.mark.parametrize("plan", ["elu1", "sdpa, elu1", "window+hedgehog"])
def test_layers_changed_after_patching(plan, operate):
    model, ids = patched_llama(plan, layers=3), tokens(2, 12, seed=4)
    operate(model, model.model.layers)
    assert torch.equal(generate(model, ids), grow(model, ids, NEW))
    hf_linattn.unpatch_model(model)
    assert torch.equal(generate(model, ids), grow(model, ids, NEW))
