"""Formulas of the first four: softmax, softmax1, elu1 and log-n scaling; quadratic, float64."""

import math

import torch
from torch import Tensor

from helpers.oracle import Inputs, elu_plus_one, formula, modifier, over_its_sum, softmax_weights


@modifier("logn")
def logn(x: Inputs) -> None:
    n = x.visible.sum(-1, keepdim=True).double().clamp(min=1)
    form, length = x.options.get("form", "log"), x.options.get("train_length", 512)
    if form != "log":
        steps = {"llama4": 1 + n // length, "ministral3": 1 + (n - 1) // length, "inkling": n / length}
        if form == "sqrt":
            x.query = x.query * (n.log() / math.log(length)).sqrt()
        else:
            x.query = x.query * (1 + x.options.get("slope", 0.1) * steps[form].clamp(min=1).log())
        return
    kappa = x.options.get("kappa")
    if kappa == "learned":
        factor = x.parameter("logn.kappa")[None, :, None, None] * n.log()
    else:
        factor = n.log() / math.log(x.options.get("train_length", 512)) if kappa is None else kappa * n.log()
    x.query = x.query * (factor.clamp(min=1) if x.options.get("clip") else factor)


@formula("softmax")
def softmax(x: Inputs) -> Tensor:
    return softmax_weights(x.scores(), x.visible, x.sink) @ x.value


@formula("softmax1")
def softmax1(x: Inputs) -> Tensor:
    own = x.options.get("sink", 0.0)
    own = x.parameter("softmax1.logit") if own == "learned" else torch.tensor([own], dtype=torch.float64)
    if x.sink is not None:
        sink = x.sink.double()  # of the head, or of head and query
        sink = sink.reshape(1, -1, 1, 1) if sink.ndim == 1 else sink
        own = torch.logaddexp(own[None, :, None, None], sink)
    return softmax_weights(x.scores(), x.visible, own) @ x.value


@formula("elu1", scores=False)
def elu1(x: Inputs) -> Tensor:
    return over_its_sum(elu_plus_one(x.query) @ elu_plus_one(x.key).mT, x.visible) @ x.value
