"""What the Triton kernel of a window with heavy hitters must do, interpreted: what torch's operations do.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

from typing import NamedTuple

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.triton import check, heavy, heavy_selftest, launch
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.patches import h2o

from . import tiny_models
from .triton_checks import close
from .triton_selftest_checks import Folder
from .triton_window_checks import Lying, key_of

OPTIONS = {"size": 16, "heavy": 6, "sinks": 2}
CONFIG = tiny_models.SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 1}
DOUBLE = torch.float64
TOKENS = 17
"""Of the package's check: few, but more than fill what is kept."""


class Case(NamedTuple):
    """A text in parts; `hidden` is what of it is padding, "" for nothing."""

    cuts: tuple[int, ...] = (40,)
    heads: int = 2
    Dv: int = 8
    hidden: str = ""
    half_life: float | None = 512.0
    positions: str = "text"
    dtype: str = "float32"
    tolerance: float = 3e-6
    options: dict = OPTIONS


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
        valid[1, :9] = False
    if case.hidden == "holes":
        valid[0, 5:9] = valid[0, 30] = False

    def tokens(heads, width):
        x = torch.randn(rows, length, heads, width, generator=generator).transpose(1, 2)
        return x.to(getattr(torch, case.dtype)).masked_fill(~valid[:, None, :, None], float("nan"))

    return tokens(case.heads, 8), tokens(1, 8), tokens(1, case.Dv), valid


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


def check_case(case):
    """Outputs and every column after, against torch's operations in float64 on the same numbers."""
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
        here.setattr(h2o, "one_kernel_takes_heavy", lambda *about: not asked.append(about))
        got, state = run(case, module, numbers)
    assert len(asked) == len(case.cuts)
    shown = numbers[3][:, None, :, None].expand_as(want)
    close(got[shown], want[shown], case.tolerance, "output")
    assert not got[~shown].any()
    for name, x, y in zip(state._fields[:2], state, after, strict=False):
        assert torch.equal(x.to(DOUBLE), y), name
    close(state.weight, after.weight, 3e-6, "weight")


def check_a_model_says_the_same(path):
    """Prompts with padding and what follows them, as through torch's operations; checked at its first use."""
    ids, patch = tiny_models.tokens(2, 40), pytest.MonkeyPatch()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model = tiny_models.build("LlamaForCausalLM", dtype=torch.float32, **CONFIG)
    patch_model(model, "h2o", options=OPTIONS)
    patch.setattr(check, "CHECKS", Checks(launch, TOKENS))
    found, lines = [], []
    for wish in ("0", "1"):
        with Folder(path, wish):
            how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
            found.append(model.generate(ids, **how, return_dict_in_generate=True, output_logits=True))
            lines.append(check.CHECKS.summary())
    patch.undo()
    assert lines[0] == ["torch: HF_LINATTN_TRITON=0"]
    name = "float32, 8x8, window and heavy hitters, turned sinks, grouped, products in ieee: triton, checked"
    assert lines[1][0].startswith(name)
    assert torch.equal(found[0].sequences, found[1].sequences)
    logits = [torch.stack(x.logits) for x in found]
    assert tiny_models.distance(logits[1], logits[0]) < 1e-5


def check_what_stays_with_torch(path):
    """Gradients, single tokens, capped scores and wide heads have no kernel, and nobody is told so."""
    module, (query, key, value, _) = module_of(Case()), given(Case())
    count = torch.arange(1.0, 41.0)[None]
    some = Tokens(query, key, value, 0.5, None, count)
    patch, asked = pytest.MonkeyPatch(), []
    patch.setattr(check, "takes_window", lambda *about: bool(asked.append(about)))
    wide = torch.zeros(1, 2, 40, 256)
    with Folder(path, "1"):
        module.causal(some, None)
        with torch.no_grad():
            module.causal(some.slice(0, 1), None)
            module.causal(Tokens(query, key, value, 0.5, None, count, softcap=5.0), None)
            module.causal(Tokens(query, key, value, 0.5, None, count, sink=torch.zeros(2)), None)
            module.causal(Tokens(wide, wide[:, :1], value, 0.5, None, count), None)
        assert not asked
        patch.undo()
        doubled = Tokens(query.double(), key.double(), value.double(), 0.5, None, count)
        with torch.no_grad(), pytest.raises(UnsupportedCallError, match=r"not torch\.float64"):
            module.causal(doubled, None)


def check_the_check(path):
    """It takes the kernel in 16 bits, and finds what is left out or changed."""
    form = HeavyForm(turned=True)
    key = key_of(form, torch.bfloat16, grouped=False)
    assert heavy_selftest.disagreement(key, heavy, TOKENS) is None

    def forward(query, near, key, value, places, before, columns, scaling):
        return heavy.forward(query, near, key, value, places, before, columns, scaling)

    def turned_away(query, near, *others):
        return forward(query, None, *others)

    def never_fades(*given):
        return forward(*given[:6], given[6]._replace(half_life=None), given[7])

    def unweighted(*given):
        output, after = forward(*given)
        return output, after._replace(weight=after.weight * 1.001)

    lies = (("output", turned_away), ("weight", unweighted), ("weight", never_fades))
    for index, (what, lie) in enumerate(lies):
        with Folder(path / str(index)):
            checks = Checks(launch, TOKENS, heavies=Lying(heavy, forward=lie))
            with pytest.warns(UserWarning, match=f"disagree with float64: {what}.*report"):
                assert not checks.takes(key_of(form, grouped=False))
