"""torch.compile without graph breaks and torch.export, equal to eager."""

import functools
import itertools

import pytest
import torch
from helpers.selection import rest_full
from helpers.tiny_models import distance, left_padded, llama, positions, tokens
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import hf_linattn

PATCHES = ["elu1", "softmax1", "logn"]
EXACT = 1e-9


@pytest.fixture(autouse=True)
def _clean_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counter:
    """Backend that runs the captured graph as it is and counts graphs and runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, example):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def breaks():
    return sum(counters["graph_break"].values())


def batches():
    ids = tokens(2, 90)
    _, mask = left_padded(ids, 13)
    at = torch.cat([torch.arange(n) for n in (30, 25, 35)])[None].expand(2, -1)
    return {
        "no mask": (ids, {}),
        "left padded": (ids, {"attention_mask": mask, "position_ids": positions(mask)}),
        "packed": (ids, {"position_ids": at}),
    }


@torch.no_grad()
@pytest.mark.parametrize(
    ("batch", "patch"),
    rest_full(
        itertools.product(batches(), PATCHES),
        [("left padded", "elu1"), ("packed", "elu1"), ("no mask", "softmax1"), ("packed", "logn")],
    ),
)
def test_forward_is_one_graph(patch, batch):
    model, counter = hf_linattn.patch_model(llama(layers=1), patch), Counter()
    ids, kwargs = batches()[batch]
    want = model(ids, use_cache=False, **kwargs).logits
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    live = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    for _ in range(2):
        assert distance(compiled(ids, use_cache=False, **kwargs).logits[live], want[live]) < EXACT
    assert (counter.graphs, counter.runs, breaks()) == (1, 2, 0)


@torch.no_grad()
@pytest.mark.parametrize("patch", rest_full([*PATCHES, "gated"], ["logn", "elu1"]))
def test_prompts_of_any_length_are_one_graph(patch):
    model, counter = hf_linattn.patch_model(llama(layers=1), patch), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (20, 40, 33):
        ids = tokens(2, length)
        assert distance(compiled(ids).logits, model(ids).logits) < EXACT
    assert (counter.graphs, counter.runs, breaks()) == (1, 3, 0)


@torch.no_grad()
@pytest.mark.parametrize("plan", rest_full([*PATCHES, {"1": "elu1"}], ["logn", {"1": "elu1"}]), ids=str)
def test_decoding_with_a_static_cache_is_one_graph(plan):
    model, counter = hf_linattn.patch_model(llama(layers=2 if isinstance(plan, dict) else 1), plan), Counter()
    ids, mask = left_padded(tokens(2, 72), 9)
    at = positions(mask)
    full = model(ids, attention_mask=mask, position_ids=at, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=80)
    whole = torch.nn.functional.pad(mask, (0, 8))  # one shape for all steps, as generate() does
    model(ids[:, :60], attention_mask=mask[:, :60], position_ids=at[:, :60], past_key_values=cache)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for i in range(60, 72):
        step = whole.clone()
        step[:, i + 1 :] = 0
        out = compiled(
            ids[:, i : i + 1], attention_mask=step, position_ids=at[:, i : i + 1], past_key_values=cache
        )
        assert distance(out.logits[:, 0], full[:, i]) < EXACT
    assert (counter.graphs, counter.runs, breaks()) == (1, 12, 0)


@torch.no_grad()
def test_decoding_with_a_dynamic_cache_does_not_compile_each_step():
    model, counter = hf_linattn.patch_model(llama(layers=1), "elu1"), Counter()
    ids = tokens(2, 72)
    full = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :60], past_key_values=cache)
    compiled = torch.compile(model, backend=counter)
    for i in range(60, 72):
        out = compiled(ids[:, i : i + 1], past_key_values=cache)
        assert distance(out.logits[:, 0], full[:, i]) < EXACT
    assert counter.graphs <= 2
    assert (counter.runs, breaks()) == (12, 0)


def gradients(model, compiled, ids, mask):
    model.zero_grad()
    loss = compiled(ids, attention_mask=mask, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "patch", rest_full([*PATCHES, "gated", "window+hedgehog"], ["elu1", "softmax1", "window+hedgehog"])
)
def test_training_step_has_the_gradients_of_eager(patch):
    options = {"size": 8, "sinks": 2} if patch.startswith("window") else None
    model = hf_linattn.patch_model(llama(layers=1), patch, options=options).train()
    counter = Counter()
    ids, mask = left_padded(tokens(2, 70), 9)
    want_loss, want = gradients(model, model, ids, mask)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    loss, got = gradients(model, compiled, ids, mask)
    assert abs(loss - want_loss) < EXACT
    assert counter.runs == counter.graphs == 1
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        assert float((got[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


# torch's own: importing inductor's dependencies still defines script methods
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@torch.no_grad()
def test_inductor():
    """One run of the compiler that users get, on the patch with the most arithmetic of its own."""
    model = hf_linattn.patch_model(llama(layers=1, dtype=torch.float32), "elu1")
    ids, mask = left_padded(tokens(2, 72), 9)
    kwargs = {"attention_mask": mask, "position_ids": positions(mask), "use_cache": False}
    got = torch.compile(model, fullgraph=True, dynamic=False)(ids, **kwargs).logits
    assert distance(got[mask.bool()], model(ids, **kwargs).logits[mask.bool()]) < 1e-4


class Logits(torch.nn.Module):
    """Tensors in, one tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids):
        out = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        return out.logits


@functools.lru_cache
def export_batch(length, padding):
    ids, mask = left_padded(tokens(2, length), padding)
    return ids, mask, positions(mask)


# strict export names attributes written while tracing: transformers' own collector of outputs, unpatched
# as well, and the cache layer that the pre-hook hands over, None here
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "patch"),
    rest_full(
        itertools.product(("static", "strict", "dynamic"), PATCHES),
        [("dynamic", "elu1"), ("strict", "softmax1"), ("static", "logn")],
    ),
)
def test_export(patch, form):
    wrapped = Logits(hf_linattn.patch_model(llama(layers=1), patch))
    batch = export_batch(70, 9)
    shapes = None
    if form == "dynamic":
        length = torch.export.Dim("length", min=2, max=500)
        shapes = {name: {1: length} for name in ("input_ids", "attention_mask", "position_ids")}
    program = torch.export.export(wrapped, batch, dynamic_shapes=shapes, strict=form == "strict").module()
    others = [batch] + ([export_batch(133, 20), export_batch(5, 2), export_batch(64, 0)] if shapes else [])
    for other in others:
        live = other[1].bool()
        assert distance(program(*other)[live], wrapped(*other)[live]) < EXACT
