"""What the tests of eval.layers share: a small linear model, texts, and a recall of our own."""

import math
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from helpers.fixtures_perplexity import make_folder
from hf_linattn import patch_model
from hf_linattn.eval.layers.model import Layer

LENGTH = 64
CONFIG = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def original(layers=4, dtype=torch.float32, **config):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **{**CONFIG, **config})).to(dtype).eval()


def learned(model):
    """Patched with hedgehog, its maps moved away from where they start, as training does."""
    patch_model(model, "hedgehog")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokenizer_of(folder):
    return AutoTokenizer.from_pretrained(make_folder(folder))


@dataclass(frozen=True)
class Answer:
    """The fields of eval.recall's rows that are read."""

    task: str
    length: int
    depth: float
    samples: int
    accuracy: float
    stderr: float
    logprob: float
    chance: float


def recall_of(costs, best=0.9, calls=None):
    """A `measure_recall` in which every linear layer costs some accuracy."""

    def measure_recall(model, tokenizer, tasks, lengths, *, samples=20, seed=0, **options):
        layers = model.model.layers
        if calls is not None:
            calls.append(tasks)
        linear = [
            i for i, layer in enumerate(layers)
            if "linattn" in layer.self_attn._modules
            and layer.self_attn.linattn.bypass is None
            and layer.self_attn.linattn.keeps_state
        ]  # fmt: skip
        accuracy = max(0.0, best - sum(costs[i] for i in linear))
        nats = math.log(max(accuracy, 0.01))
        return [Answer(t, n, 0.5, samples, accuracy, 0.0, nats, 0.01) for t in tasks for n in lengths]

    return measure_recall


__all__ = ["LENGTH", "learned", "original", "recall_of", "tokenizer_of"]


def stack(count, **fields):
    """Layers that no model has."""
    keys = {"patch": "hedgehog", "options": {}, **fields}
    return [Layer(i, str(i), f"model.layers.{i}.self_attn", **keys) for i in range(count)]
