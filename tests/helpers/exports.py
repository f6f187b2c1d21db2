"""Patched models as exported programs: torch.export and ONNX with dynamic rows and length, held to eager."""

import warnings

import torch
from torch import nn

from helpers.tiny_models import build, distance, left_padded, llama, tokens
from hf_linattn import patch_model

ROWS, LENGTH = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("length", min=2, max=250)
EXAMPLE = (2, 70, 9)
"""Rows, tokens, and padded ones at the left of the first row: what is traced."""
OTHERS = ((3, 133, 20), (1, 5, 2), (4, 64, 0), (2, 2, 0), (1, 129, 128))
"""What the program is then run on: shorter than windows and chunks, longer, and not their multiples."""
ENCODER = {"max_position_embeddings": 256, "pad_token_id": 0, "vocab_size": 97, "intermediate_size": 64}
SIZES = {
    "decay": {"half_life": 20.0},
    "linformer": {"rank": 16, "max_length": 250},
    "local": {"size": 24},
    "lsh": {"buckets": 8, "rounds": 2},
    "linear": {"feature_map": "softplus"},
    "pooled": {"size": 6},
    "strided": {"stride": 8},
    "topk": {"k": 8},
    "window": {"size": 24, "sinks": 3},
}
"""Options of patches under which they matter in some hundred tokens, or that they need."""


class Logits(nn.Module):
    """Tensors in, one tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False)[0]


def gpt2(dtype):
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 256, "vocab_size": 97}
    return build("GPT2LMHeadModel", dtype=dtype, bos_token_id=1, eos_token_id=None, **sizes)


def encoder(dtype):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, **ENCODER}
    return build("BertModel", dtype=dtype, **sizes)


def patched(spec, model=None, dtype=torch.float32, **options):
    """A tiny llama with this patch, or an encoder for patches of encoders."""
    parts = spec.split("+")
    if model is None:
        model = encoder(dtype) if {"linformer", "power"} & set(parts) else llama(layers=1, dtype=dtype)
    options = {key: value for part in parts for key, value in SIZES.get(part, {}).items()} | options
    return Logits(patch_model(model, spec, options=options)).eval()


def batch(rows, length, padding, with_mask=True):
    ids, mask = left_padded(tokens(rows, length), padding if with_mask else 0)
    return (ids, mask) if with_mask else (ids,)


def shapes(with_mask):
    return ({0: ROWS, 1: LENGTH},) * (2 if with_mask else 1)


@torch.no_grad()
def exported(model, with_mask=True, **options):
    """The program of a wrapped model."""
    example = batch(*EXAMPLE, with_mask)
    return torch.export.export(model, example, dynamic_shapes=shapes(with_mask), **options)


def to_onnx(program):
    """The program as an ONNX model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, of its dependencies
        return torch.onnx.export(program, dynamo=True, verbose=False)


@torch.no_grad()
def farthest(run, model, with_mask=True):
    """The largest distance of a program's output to eager's, at visible tokens, over all batches."""
    worst = 0.0
    for case in (EXAMPLE, *OTHERS):
        inputs = batch(*case, with_mask)
        live = inputs[1].bool() if with_mask else torch.ones_like(inputs[0], dtype=torch.bool)
        far = distance(run(*inputs)[live], model(*inputs)[live])
        worst = far if far != far else max(worst, far)  # NaN is far
        if worst != worst:
            break
    return worst


def runner(model, folder):
    """A function that runs an ONNX model in onnxruntime."""
    import onnxruntime

    path = folder / "model.onnx"
    model.save(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def run(*inputs):
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run
