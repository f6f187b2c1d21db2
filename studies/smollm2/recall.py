"""Ask a model for what it read, key by key and for a passkey, at 1,024 to 8,192 tokens."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from hf_linattn import from_pretrained
from hf_linattn.cli.files import write_json
from hf_linattn.eval.common.results import default_device
from hf_linattn.eval.recall import measure_recall
from hf_linattn.patching.loading import load_tokenizer

ASKED = {"key_value": 4, "passkey": 1}
"""Samples of each length and depth."""


def main(argv: list[str] | None = None) -> None:
    """Measure one model and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    model = from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval().to(default_device())
    tokenizer = load_tokenizer(args.model)
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    rows = []
    for task, samples in ASKED.items():
        rows += measure_recall(model, tokenizer, (task,), args.lengths, depths=depths, samples=samples)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(args.output_dir / "results.json", {"rows": [asdict(row) for row in rows], "complete": True})


if __name__ == "__main__":
    main()
