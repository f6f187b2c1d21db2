"""Measure what attention sinks cost: mass on the first token, outliers, and the loss after 8-bit rounding.

Weights and inputs of every linear layer but the head are rounded to 255 levels of one scale per tensor, the
coarsest form there is: a single large number takes the levels from all others.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from hf_linattn import from_pretrained
from hf_linattn.cli.files import write_json
from hf_linattn.eval.common.results import default_device
from hf_linattn.eval.diagnose import diagnose
from hf_linattn.patching.loading import load_tokenizer

LENGTH, WINDOWS, LOOKED_AT = 1024, 8, 2
LEVELS = 127


def rounded(x: Tensor) -> Tensor:
    """Round to multiples of the largest absolute value over 127.

    >>> rounded(torch.tensor([127.0, 1.4]))
    tensor([127.,   1.])
    """
    scale = x.abs().amax() / LEVELS
    return (x / scale).round() * scale


def round_linear_layers(model: nn.Module) -> None:
    """Round weights, in place, and from now on inputs."""
    head = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            layer.weight.data = rounded(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor) -> float:
    """Of rows of tokens `[B, N]`."""
    return math.exp(mean(float(model(row[None], labels=row[None]).loss) for row in ids))


def main(argv: list[str] | None = None) -> None:
    """Measure one model and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    model = from_pretrained(args.model, dtype=torch.float32).eval().to(default_device())
    text = args.data.read_text(encoding="utf-8")[: 10 * LENGTH * WINDOWS]
    ids = load_tokenizer(args.model)(text, return_tensors="pt", verbose=False)["input_ids"]
    ids = ids[0, : LENGTH * WINDOWS].view(WINDOWS, LENGTH).to(model.device)
    found = diagnose(model, ids[:LOOKED_AT])
    result = {
        "sink": mean(head.sink for head in found.heads),
        "kurtosis": max(layer.kurtosis for layer in found.layers),
        "inf_norm": max(layer.inf_norm for layer in found.layers),
        "perplexity": perplexity(model, ids),
    }
    round_linear_layers(model)
    result["rounded"] = perplexity(model, ids)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(args.output_dir / "results.json", {**result, "complete": True})


if __name__ == "__main__":
    main()
