"""What the Triton kernel of a window with heavy hitters must do, interpreted: what torch's operations do.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.triton import check, heavy, heavy_selftest, launch
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.heavy_selftest import HeavyForm

from . import tiny_models
from .heavy_checks import CONFIG, OPTIONS, Case, given, module_of
from .triton_selftest_checks import Folder
from .triton_window_checks import Lying, key_of

TOKENS = 17
"""Of the package's check: few, but more than fill what is kept."""


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

    def untold(*given, **named):
        return forward(*given)

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
