"""Put a patch into a model, without training, and save it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_linattn import from_pretrained, patch_model
from hf_linattn.patching.loading import load_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--patch", type=lambda text: json.loads(text) if text.startswith("{") else text, required=True
    )
    parser.add_argument("--options", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--output-dir", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Save the patched model, and its tokenizer."""
    args = build_parser().parse_args(argv)
    model = patch_model(from_pretrained(args.model, dtype="auto"), args.patch, options=args.options)
    load_tokenizer(args.model).save_pretrained(args.output_dir)
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
