"""Off the CPU nothing waits for the device: a number that Python must see would stop the stream there.

The meta device holds no numbers, so whatever asks for one raises.
"""

import pytest
import torch
from helpers import tiny_models
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.ops.triton import launch
from hf_linattn.ops.triton.problem import Launches
from hf_linattn.patches import h2o
from hf_linattn.patches.elu1 import Elu1

SPECS = {
    "elu1": {},
    "hedgehog": {},
    "gated": {},
    "decay": {},
    "taylor2": {},
    "window+elu1": {"size": 8, "sinks": 2},
    "delta": {},
    "window": {"size": 8, "sinks": 2},
    "h2o": {"size": 8, "heavy": 4, "sinks": 2},
}


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_prefill_and_decode_do_not_wait(meta, spec):
    model = patch_model(tiny_models.llama(), spec, options=SPECS[spec]).eval().to(meta)
    ids = torch.zeros(2, 20, dtype=torch.long, device=meta)
    cache = model(ids, use_cache=True).past_key_values
    for _ in range(2):
        logits = model(ids[:, :1], past_key_values=cache).logits
    assert logits.device == meta


@pytest.mark.skipif(not launch.available("cuda"), reason="triton is not installed: pip install triton")
@torch.no_grad()
def test_the_kernels_of_h2o_do_not_wait_for_padding(meta, monkeypatch):
    launched = []
    monkeypatch.setattr(h2o, "one_kernel_takes_heavy", lambda *about: True)
    monkeypatch.setattr(Launches, "launch", lambda self, kernel, *about: launched.append(kernel.__name__))
    model = patch_model(tiny_models.llama(), "h2o", options=SPECS["h2o"]).float().to(meta)
    module = model.model.layers[0].self_attn.linattn.h2o
    query, key, value = (torch.zeros(2, heads, 20, 8, device=meta) for heads in (4, 2, 2))
    valid, count = torch.ones(2, 20, dtype=torch.bool, device=meta), torch.ones(2, 20, device=meta)
    state, whole = None, Tokens(query, key, value, 1.0, valid, count)
    for _ in range(2):
        output, state = module.causal(whole, state)
    assert output.shape == query.shape
    one = Tokens(query[:, :, :1], key[:, :, :1], value[:, :, :1], 1.0, valid[:, :1], count[:, :1])
    _, state = module.causal(one, state)
    prompt = ["prompt_sums", "prompt_choices", "prompt_outputs", "prompt_cache"]
    assert launched == [*prompt, *prompt, "window_and_heavy"]
    assert state.key.shape == (2, 2, module.columns, 8)


def test_a_fixed_decay_reads_no_numbers(monkeypatch):
    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            found = function(*arguments, **(options or {}))
            if isinstance(found, torch.Tensor):
                made.append(found.untyped_storage().nbytes())
            return found

    def copied(*data, **options):
        raise AssertionError("numbers are copied to the device")

    tokens = Tokens(*(torch.zeros(1, 2, 400, 64, dtype=torch.bfloat16) for _ in "qkv"), 1.0)
    for options in ({}, {"rates": "lightning"}, {"half_life": 100}):
        made = []
        model = patch_model(tiny_models.llama(), "decay", options=options)
        module = model.model.layers[0].self_attn.linattn.decay
        with Sizes(), monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", copied)
            found = module._log_decays(tokens)
        assert found.shape == (1, 2, 400)
        assert found.dtype is torch.float32
        assert max(made) <= 2 * 400 * 4


def test_the_device_tells():
    waiting = type("Waiting", (Elu1,), {"feature_map": lambda self, x: x.relu() if bool(x.any()) else x})
    given = (torch.zeros(1, 2, 5, 8, device="meta") for _ in "qkv")
    with pytest.raises(RuntimeError, match="meta"):
        waiting(None).sums(Tokens(*given, 1.0), None)
