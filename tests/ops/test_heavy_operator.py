"""h2o under torch.compile: one operator where kernels compute it, the same as without a compiler."""

import shutil

import pytest
import torch
from helpers import tiny_models, triton_heavy_checks
from helpers.heavy_checks import OPTIONS, Case, given, module_of
from helpers.properties import close
from torch._dynamo.utils import counters
from transformers import StaticCache

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.ops.cpp import build
from hf_linattn.ops.triton import launch

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here"),
]
CONFIG = tiny_models.SIZES | {"num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _clean_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Graphs:
    """Backend that differentiates graphs as a compiler would, runs them as they are, and counts operators."""

    def __init__(self):
        self.operators = []

    def __call__(self, graph, example):
        wanted = torch.ops.hf_linattn.heavy
        self.operators.append(sum(node.target in (wanted, wanted.default) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)


def model_of(dtype=torch.float32):
    model = tiny_models.build("LlamaForCausalLM", dtype=dtype, **CONFIG)
    return patch_model(model, "h2o", options={**OPTIONS, "positions": "auto"})


def text(padded, length=60):
    ids = tiny_models.tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, : 9 * padded] = 0
    return ids, {"attention_mask": mask, "use_cache": False}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt(padded, dtype):
    model, graphs, (ids, how) = model_of(dtype), Graphs(), text(padded)
    want = model(ids, **how).logits
    got = torch.compile(model, backend=graphs, fullgraph=True)(ids, **how).logits
    assert graphs.operators == [2]
    close(got, want, 1e-6 if dtype == torch.float32 else 2e-2)


@torch.no_grad()
def test_texts_of_other_lengths_are_no_other_graphs():
    model, graphs = model_of(), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for length in (60, 75, 14, 91):
        ids, how = text(True, length)
        close(compiled(ids, **how).logits, model(ids, **how).logits, 1e-6)
    assert graphs.operators == [2, 2]


@torch.no_grad()
def test_tokens_behind_a_static_cache():
    model, graphs, ids = model_of(), Graphs(), tiny_models.tokens(2, 60)
    cache = StaticCache(config=model.config, max_cache_len=60)
    full = model(ids, use_cache=False).logits
    mask = torch.ones_like(ids)
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for i in range(40, 60):
        seen = mask * (torch.arange(60) <= i)
        at = torch.full((2, 1), i)
        out = compiled(ids[:, i : i + 1], attention_mask=seen, position_ids=at, past_key_values=cache)
        close(out.logits[:, 0], full[:, i], 1e-5)
    assert graphs.operators == [2]


@pytest.mark.parametrize("padded", [False, True])
def test_gradients(padded):
    model, graphs, (ids, how) = model_of().train(), Graphs(), text(padded)
    found = []
    for run in (model, torch.compile(model, backend=graphs, fullgraph=True)):
        run(ids, labels=ids, **how).loss.backward()
        found.append([x.grad.clone() for x in model.parameters()])
        model.zero_grad()
    assert graphs.operators == [2]
    for got, want in zip(found[1], found[0], strict=True):
        close(got, want, 1e-5)


def test_what_no_kernel_computes_is_traced():
    """Capped scores and a text that goes on with gradients: torch's operations, as before."""
    module, (query, key, value, _) = module_of(Case(cuts=(30,))), given(Case(cuts=(30,)))
    count = torch.arange(1.0, 31.0)[None]
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def capped(*inputs):
        return module.causal(Tokens(*inputs, 0.5, None, count, softcap=3.0), None)[0]

    def goes_on(*inputs):
        tokens = Tokens(*inputs, 0.5, None, count)
        return module.causal(tokens.slice(20, 30), module.causal(tokens.slice(0, 20), None)[1])[0]

    for function, operators in ((capped, 0), (goes_on, 1)):
        graphs, found = Graphs(), []
        for run in (function, torch.compile(function, backend=graphs, fullgraph=True)):
            output = run(*leaves)
            found.append((output.detach(), *torch.autograd.grad(output.square().sum(), leaves)))
        assert graphs.operators == [operators]
        for got, want in zip(*found, strict=True):
            close(got, want, 1e-5)


@pytest.mark.parametrize("learns", [False, True])
def test_the_operator_keeps_its_word(learns):
    """Shapes, dtypes and strides that it names while traced are those it has; no argument is written to."""
    case = Case(cuts=(30,), heads=2, Dv=24)
    module, (query, key, value, _) = module_of(case), given(case)
    columns = module.sizes._replace(half_life=20.0)
    seen, new = torch.zeros(1, dtype=torch.int32), torch.full((1,), 30, dtype=torch.int32)
    inputs = [x.requires_grad_(learns) for x in (query, query.clone(), key, value)]
    given_ = (*inputs, seen, new, None, *(None,) * 4, *columns, 0.5, "cpp", learns)
    torch.library.opcheck(torch.ops.hf_linattn.heavy.default, given_)


@pytest.mark.skipif(not launch.available("cuda"), reason="triton is not installed: pip install triton")
def test_triton_kernels(interpreted):
    interpreted(triton_heavy_checks.check_in_a_graph)
