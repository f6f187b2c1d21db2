"""Why scores are divided by sqrt(d): their variance, and what it leaves of softmax's gradient.

python studies/scale.py --output results.json

Queries and keys are random normal vectors of variance 1, as after a normalisation. Over KEYS keys, by head
dimension d: the variance of the scores, the entropy of their softmax, and the Frobenius norm of the softmax's
Jacobian, diag(w) - w w^T, through which every gradient to queries and keys goes, and the share of queries at
which it is below SMALL. "dot" is q . k, "scaled" is
q . k / sqrt(d), "additive" is v . tanh(W q + U k) with all three drawn as torch's linear layers draw them
(Bahdanau et al. 2015, arXiv:1409.0473). The claim: "Attention Is All You Need", section 3.2.1, footnote 4.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn.cli.files import write_json

DIMENSIONS = (8, 16, 32, 64, 128, 256)
KEYS, QUERIES, SEEDS = 256, 512, 3
SMALL = 0.01
"""A tenth of the Jacobian's norm at scaled scores: below it a query counts as saturated."""


def scores(kind: str, size: int, generator: torch.Generator) -> Tensor:
    """Draw scores `[QUERIES, KEYS]` in float64."""
    query, key = (
        torch.randn(count, size, generator=generator, dtype=torch.float64) for count in (QUERIES, KEYS)
    )
    if kind != "additive":
        return query @ key.mT / (size**0.5 if kind == "scaled" else 1.0)
    wide = 1 / size**0.5  # the bound of nn.Linear's uniform weights
    left, right = (_uniform((size, size), wide, generator) for _ in "WU")
    hidden = nn.functional.tanh((query @ left.mT)[:, None] + (key @ right.mT)[None])
    return hidden @ _uniform((size,), wide, generator)


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


def measured(kind: str, size: int, seed: int) -> dict[str, float]:
    """Measure one draw of scores; means over queries."""
    s = scores(kind, size, torch.Generator().manual_seed(seed))
    weights = s.softmax(-1)
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    squares = weights.square()
    # |diag(w) - w w^T|^2 = sum w^2 - 2 sum w^3 + (sum w^2)^2
    jacobian = squares.sum(-1) - 2 * (squares * weights).sum(-1) + squares.sum(-1).square()
    jacobian = jacobian.clamp_min(0).sqrt()
    return {
        "variance": float(s.var(-1).mean()),
        "entropy": float(entropy.mean()),
        "jacobian": float(jacobian.mean()),
        "saturated": float((jacobian < SMALL).double().mean()),
    }


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="json file to write")
    output: Path = parser.parse_args().output
    rows: list[dict[str, Any]] = []
    for kind in ("dot", "scaled", "additive"):
        for size in DIMENSIONS:
            draws = [measured(kind, size, seed) for seed in range(SEEDS)]
            figures = {name: [draw[name] for draw in draws] for name in draws[0]}
            rows.append({"kind": kind, "d": size, **figures})
            print(f"{kind:9} d {size:3}  " + "  ".join(f"{n} {mean(v):.4g}" for n, v in figures.items()))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, {"complete": True, "rows": rows})


if __name__ == "__main__":
    main()
