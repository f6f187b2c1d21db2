"""One patch of each kind that docs/compatibility.md has a column for, on a small model."""

import torch

from helpers import tiny_models
from hf_linattn import patch_model

KINDS = {
    "scores": ("softmax1+logn", {"train_length": 32}),
    "linear": ("elu1", {}),
    "gated": ("gated", {}),
    "hybrid": ("window+hedgehog", {"size": 8}),
    "encoder": ("hedgehog", {}),
}
DECODERS = [kind for kind in KINDS if kind != "encoder"]


def plain_model(kind):
    if kind != "encoder":
        return tiny_models.llama(2, dtype=torch.float32)
    sizes = {name: size for name, size in tiny_models.SIZES.items() if name[:3] not in ("num", "hea")}
    return tiny_models.build(
        "BertForMaskedLM", dtype=torch.float32, num_hidden_layers=2, num_attention_heads=4,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **sizes,
    )  # fmt: skip


def patched_model(kind):
    """Weights of the patch are away from where they start."""
    spec, options = KINDS[kind]
    model = patch_model(plain_model(kind), spec, options=options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
