"""What the Triton kernel of a window with heavy hitters must do, interpreted: what torch's operations do.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import heavy_operator
from hf_linattn.ops.triton import (
    check,
    heavy,
    heavy_backward,
    heavy_backward_kernels,
    heavy_selftest,
    launch,
)
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.ops.types import HeavyChoices
from hf_linattn.patches import h2o

from . import tiny_models
from .heavy_checks import CONFIG, OPTIONS, Case, given, gradients, module_of
from .properties import close
from .triton_selftest_checks import Folder
from .triton_window_checks import Lying, key_of

TOKENS = 17
"""Of the package's check: few, but more than fill what is kept."""


def check_gradients(case):
    """Those of all kernels, in float32, against those of walking in float64."""
    module, numbers = module_of(case), given(case)
    want = gradients(module, numbers, lambda tokens: module._forward(tokens, None))
    got = _by_kernels(module, numbers)
    for x, y in zip((got[0], *got[2]), (want[0], *want[2]), strict=True):
        close(x, y, 3e-6)


def _by_kernels(module, numbers):
    backward, patch, calls = heavy_backward.backward, pytest.MonkeyPatch(), []
    with patch.context() as here:
        here.setattr(heavy_backward, "backward", lambda *x: calls.append(1) or backward(*x))
        here.setattr(h2o, "one_kernel_takes_heavy", lambda *about: True)
        found = gradients(module, numbers, lambda tokens: module.causal(tokens, None), torch.float32)
    assert calls
    return found


def check_in_a_graph():
    """Outputs, the cache and gradients through the operator of torch.compile."""
    case = Case(cuts=(30,), hidden="left", positions="cache")
    module, numbers, patch = module_of(case), given(case), pytest.MonkeyPatch()
    want = gradients(module, numbers, lambda tokens: module.causal(tokens, None), torch.float32)
    patch.setattr(heavy_operator, "backend_of", lambda *about: "triton")
    compiled = torch.compile(lambda tokens: module.causal(tokens, None), backend="aot_eager", fullgraph=True)
    got = gradients(module, numbers, compiled, torch.float32)
    with torch.no_grad():
        tokens = Tokens(*(x.nan_to_num() for x in numbers[:3]), 0.5, numbers[3], numbers[3].cumsum(1))
        plain = compiled(tokens)
    patch.undo()
    for x, y in zip((got[0], *got[2]), (want[0], *want[2]), strict=True):
        close(x, y, 3e-6)
    close(plain[0], want[0], 3e-6)
    close(plain[1].weight, want[1].weight, 3e-6)


def check_the_same_bits(path):
    """Whether parts of all key heads are there at a time or those of one, and twice."""
    case = Case(cuts=(26,), kv_heads=2, hidden="left", positions="cache")
    module, numbers, patch, found = module_of(case), given(case), pytest.MonkeyPatch(), []
    for most in (heavy_backward.BYTES, heavy_backward.BYTES, 1):
        with patch.context() as here:
            here.setattr(heavy_backward, "BYTES", most)
            found.append(_by_kernels(module, numbers)[2])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def check_a_model_learns_the_same(path):
    """The gradients of all weights, with padding and where activations are computed again."""
    ids, patch = tiny_models.tokens(2, 40), pytest.MonkeyPatch()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model = tiny_models.build("LlamaForCausalLM", dtype=torch.float32, **CONFIG)
    patch_model(model, "h2o", options=OPTIONS).train()
    patch.setattr(check, "CHECKS", Checks(launch, TOKENS))
    found = []
    for wish in ("0", "1", "again"):
        if wish == "again":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with Folder(path, "1" if wish == "again" else wish):
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
            lines = check.CHECKS.summary()
        found.append([x.grad for x in model.parameters()])
        model.zero_grad()
    patch.undo()
    assert "turned sinks, gradients, grouped, products in ieee: triton, checked" in lines[0]
    for x, *others in zip(*found, strict=True):
        for y in others:
            close(y, x, 1e-5)


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
    """Capped scores, sinks of the model and wide heads have no kernel, and nobody is told so."""
    module, (query, key, value, _) = module_of(Case()), given(Case())
    count = torch.arange(1.0, 41.0)[None]
    some = Tokens(query, key, value, 0.5, None, count)
    patch, asked = pytest.MonkeyPatch(), []
    patch.setattr(check, "takes_window", lambda *about: bool(asked.append(about)))
    wide = torch.zeros(1, 2, 40, 256)
    with Folder(path, "1"):
        module.causal(some, None)
        with torch.no_grad():
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

    forward = heavy.forward

    def turned_away(query, near, *others, **named):
        return forward(query, None, *others, **named)

    def never_fades(*given, **named):
        return forward(*given[:6], given[6]._replace(half_life=None), given[7], **named)

    def unweighted(*given, **named):
        output, after = forward(*given, **named)
        return output, after._replace(weight=after.weight * 1.001)

    def untold(*given, choices=None, **named):
        return forward(*given, choices=choices and HeavyChoices(choices.chosen.clone()))

    lies = (
        ("output", turned_away),
        ("weight", unweighted),
        ("weight", never_fades),
        ("choices are not told", untold),
    )
    for index, (what, lie) in enumerate(lies):
        with Folder(path / str(index)):
            checks = Checks(launch, TOKENS, heavies=Lying(heavy, forward=lie))
            with pytest.warns(UserWarning, match=f"disagree with float64: {what}.*report"):
                assert not checks.takes(key_of(form, grouped=False))


def check_the_check_of_gradients(path):
    """It takes the kernels in 16 bits, and finds what is left out or changed."""
    form = HeavyForm(turned=True, learns=True)
    key = key_of(form, torch.bfloat16, grouped=False)
    assert heavy_selftest.disagreement(key, heavy, TOKENS) is None
    backward, kernels = heavy_backward.backward, heavy_backward_kernels

    def no_parts(chosen, sinks, length):
        places, begins = by_token(chosen, sinks, length)
        return places, torch.zeros_like(begins)

    def one_more(number, size, sinks, block):
        return number * block + size + sinks

    def unturned(grad, query, near, *others):
        return backward(grad, query, near, *others)._replace(near=torch.zeros_like(near))

    by_token = heavy_backward._by_token
    lies = (
        ("d_key", heavy_backward, "_by_token", no_parts),
        ("d_near", heavy_backward, "backward", unturned),
        ("d_key", kernels, "first_behind", one_more),
    )
    for index, (what, module, name, lie) in enumerate(lies):
        patch = pytest.MonkeyPatch()
        patch.setattr(module, name, lie)
        warned = pytest.warns(UserWarning, match=f"disagree with float64: {what}.*report")
        with Folder(path / str(index)), warned:
            assert not Checks(launch, TOKENS).takes(key_of(form, grouped=False))
        patch.undo()
