"""A document read once, segment by segment: the memory does not grow with what has been read.

python examples/streaming_perplexity.py [MODEL]
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from hf_linattn import describe, from_pretrained, patch_model
from hf_linattn.patching.cache_layers import CACHE_NAME, output_cache

SEGMENT = 256
folder = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "base")
model = from_pretrained(folder, dtype=torch.float32)
patch_model(model, "elu1")  # not fine-tuned: a high perplexity is to be expected
print(f"state of a sequence of any length: {describe(model).state_bytes:,} bytes")

text = Path(argparse.__file__).read_text(encoding="utf-8")
ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", verbose=False)["input_ids"][:, :2049]

cache, nats, tokens = None, 0.0, 0
with torch.no_grad():
    for start in range(0, ids.shape[1] - 1, SEGMENT):
        part = ids[:, start : start + SEGMENT + 1]
        out = model(part[:, :-1], use_cache=True, **{CACHE_NAME: cache})
        cache = output_cache(out)
        nats += F.cross_entropy(out.logits[0], part[0, 1:], reduction="sum").item()
        tokens += part.shape[1] - 1
        print(f"{tokens:6,} tokens read, perplexity so far {math.exp(nats / tokens):.1f}")
