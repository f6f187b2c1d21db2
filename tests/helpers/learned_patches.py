"""A patch with weights, for tests: a learned linear map before elu1, registered while a test runs."""

import contextlib

import torch
from torch import nn

from helpers import tiny_models
from hf_linattn import patch_model, register, registry
from hf_linattn.attention import LinearAttention

NAME = "learned_map"
PLAN = {"0": "softmax1+logn", "1": NAME, "2": "softmax"}
"""A plan for three layers: a composition, a patch with weights, and a layer that stays as it was."""


class LearnedMap(LinearAttention):
    """elu(W x + b) + 1."""

    def __init__(self, site, *, bias: bool = True):
        super().__init__(site)
        self.map = nn.Linear(site.head_dim, site.head_dim, bias=bias)

    def feature_map(self, x):
        weight = self.map(x.to(torch.float64) if x.dtype == torch.float64 else x.to(self.map.weight.dtype))
        return nn.functional.elu(weight.to(x.dtype)) + 1


@contextlib.contextmanager
def registered(cls=LearnedMap, name=NAME):
    register(name)(cls)
    try:
        yield
    finally:
        del registry._PATCHES[name]


def patched_llama(plan=None, dtype=torch.float32, **options):
    """Three layers, patched, with weights of the patch that matter."""
    model = patch_model(tiny_models.llama(3, dtype=dtype, **options), PLAN if plan is None else plan)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name:
                parameter.normal_(0, 0.4)
    return model


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False)[0]


def state(model):
    """Everything of a model that patching could leave behind: modules, attributes, hooks, configs."""
    modules = {}
    for name, module in model.named_modules():
        hooks = {
            key: len(value) for key, value in module.__dict__.items() if key.endswith("_hooks") and value
        }
        configs = {key: id(value) for key, value in module.__dict__.items() if key == "config"}
        modules[name] = (type(module), id(module), sorted(module.__dict__), hooks, configs)
    return modules, list(model.state_dict()), model.config.to_dict(), model.config._attn_implementation
