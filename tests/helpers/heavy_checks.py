"""What a kernel of a window with heavy hitters must do: what torch's operations do in float64."""

from typing import NamedTuple

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.patches import h2o

from . import tiny_models
from .triton_checks import close

OPTIONS = {"size": 16, "heavy": 6, "sinks": 2}
CONFIG = tiny_models.SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 1}
DOUBLE = torch.float64


class Case(NamedTuple):
    """A text in parts; `hidden` is what of it is padding, "" for nothing, "long" for more than a part."""

    cuts: tuple[int, ...] = (40,)
    heads: int = 2
    kv_heads: int = 1
    Dv: int = 8
    hidden: str = ""
    half_life: float | None = 512.0
    positions: str = "text"
    dtype: str = "float32"
    tolerance: float = 3e-6
    options: dict = OPTIONS


SMALL = {"size": 9, "heavy": 4, "sinks": 0}
MANY = {"size": 24, "heavy": 33, "sinks": 3}


def module_of(case):
    """The attention of a model's only layer."""
    model = tiny_models.build("LlamaForCausalLM", dtype=torch.float32, **CONFIG)
    options = case.options | {"half_life": case.half_life, "positions": case.positions}
    return patch_model(model, "h2o", options=options).model.layers[0].self_attn.linattn.h2o


def given(case):
    """Queries, keys, values and which of them count."""
    generator = torch.Generator().manual_seed(3)
    rows, length = 1 + bool(case.hidden), sum(case.cuts)
    valid = torch.ones(rows, length, dtype=torch.bool)
    if case.hidden:
        valid[1, : 19 if case.hidden == "long" else 9] = False
    if case.hidden == "holes":
        valid[0, 5:9] = valid[0, 30] = False

    def tokens(heads, width):
        x = torch.randn(rows, length, heads, width, generator=generator).to(getattr(torch, case.dtype))
        return x.masked_fill(~valid[..., None, None], float("nan")).transpose(1, 2)  # as models lay them out

    return tokens(case.heads, 8), tokens(case.kv_heads, 8), tokens(case.kv_heads, case.Dv), valid


def run(case, module, numbers):
    """Outputs of all parts, and the state after."""
    *inputs, valid = numbers
    count, outputs, state, start = valid.cumsum(1), [], None, 0
    for length in case.cuts:
        part = slice(start, start + length)
        own = [x[:, :, part] for x in inputs]
        seen = valid[:, part] if case.hidden else None
        output, state = module.causal(Tokens(*own, 0.5, seen, count[:, part]), state)
        outputs.append(output.to(DOUBLE))
        start += length
    return torch.cat(outputs, 2), state


def check_case(case, takes="one_kernel_takes_heavy"):
    """Outputs and every column after, against torch's operations in float64 on the same numbers.

    Args:
        case: what is computed.
        takes: the question to whose answer the kernel is called.
    """
    module, numbers, patch = module_of(case), given(case), pytest.MonkeyPatch()
    near = module._near
    with torch.no_grad(), patch.context() as here:
        # sinks meet queries in the model's dtype
        of = numbers[0].dtype

        def rounded(query, tokens):
            found = near(query, tokens)
            return found if found is None or of == torch.float32 else found.div(0.5).to(of).to(DOUBLE) * 0.5

        here.setattr(module, "_near", rounded)
        exact = [x.to(DOUBLE) for x in numbers[:3]]
        want, after = run(case, module, (*exact, numbers[3]))
    asked = []
    with torch.no_grad(), patch.context() as here:
        here.setattr(h2o, takes, lambda *about: not asked.append(about))
        got, state = run(case, module, numbers)
    assert len(asked) == len(case.cuts)
    shown = numbers[3][:, None, :, None].expand_as(want)
    close(got[shown], want[shown], case.tolerance, "output")
    assert not got[~shown].any()
    for name, x, y in zip(state._fields[:2], state, after, strict=False):
        assert torch.equal(x.to(DOUBLE), y), name
    close(state.weight, after.weight, 3e-6, "weight")
    holds = after.weight > 0
    assert torch.equal(state.rank[holds], after.rank[holds])


def gradients(module, numbers, how, dtype=torch.float64, **others):
    """Outputs, the state and the gradients of queries, keys, values and sinks, of a loss on all of it."""
    *inputs, valid = numbers
    shown = valid[:, None, :, None]
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    sink = others.pop("sink", None)
    if sink is not None:
        leaves.append(sink := sink.to(dtype).requires_grad_())
    seen = None if bool(valid.all()) else valid
    count = valid.cumsum(1)
    output, state = how(Tokens(*leaves[:3], 0.5, seen, count, sink=sink, **others))
    generator = torch.Generator().manual_seed(5)
    loss = 0
    assert not output[~shown.expand_as(output)].any()
    for x in (output, state.key, state.value):
        loss = loss + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    found = torch.autograd.grad(loss, leaves)
    # what is padding may have any gradient that is a number, and has none
    assert not any(x[~shown.expand_as(x)].any() for x in found[:3])
    return output.detach(), state._replace(key=state.key.detach(), value=state.value.detach()), found
