"""Weights that accelerate keeps elsewhere: those inside an attention are loaded for it too."""

import pytest
import torch
from helpers import tiny_models
from helpers.learned_patches import logits

from hf_linattn import patch_model
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.cpp import layout

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
SMALL = {"size": 8, "sinks": 2}
PLANS = {
    "elu1": {},
    "softmax1+output_gate": {},
    "window+hedgehog": {**SMALL, "mix": "learned"},
    "window+gated": {**SMALL, "feature_map": "hedgehog"},
    "window+delta": {**SMALL, "feature_map": "hedgehog"},
    "gated": {"feature_map": "hedgehog", "front": True},
}
NEW = 8


@pytest.fixture(params=["torch", "cpp"])
def form(request):
    """Both forms: a kernel reads weights by their address."""
    if request.param == "cpp":
        request.getfixturevalue("compiled")


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("spec", PLANS)
def test_an_offloaded_model_is_the_model(spec):
    model = patch_model(tiny_models.llama(dtype=torch.float32), spec, options=PLANS[spec]).eval()
    ids = tiny_models.tokens(2, 30)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want, tokens = logits(model, ids), model.generate(ids, **kwargs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for _ in range(2):
        torch.testing.assert_close(logits(model, ids), want, rtol=0, atol=1e-6)
    assert torch.equal(model.generate(ids, **kwargs), tokens)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_kernel_reads_no_weight_that_is_elsewhere():
    with pytest.raises(UnsupportedCallError, match="on meta has no memory that a kernel in C"):
        layout.address(torch.ones(2, 3, device="meta"))
    with pytest.raises(UnsupportedCallError, match="on meta has no memory that a kernel in C"):
        layout.array(torch.ones(1, 2, 3, 4, device="meta"))
    assert layout.address(torch.ones(0)) == 0
