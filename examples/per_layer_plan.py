"""A patch for some layers only; saved and loaded like any other checkpoint.

python examples/per_layer_plan.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import torch

from hf_linattn import describe, from_pretrained, patch_model

folder = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "base")
model = from_pretrained(folder, dtype=torch.float32)
layers = model.config.num_hidden_layers

# the first half linear, with a state of constant size; the last layer's scores scaled; the rest unchanged
plan = {f"0-{layers // 2 - 1}": "elu1", str(layers - 1): "softmax1+logn"}
patch_model(model, plan, options={"train_length": model.config.max_position_embeddings})
print(describe(model))

ids = torch.arange(1, 33)[None]
with tempfile.TemporaryDirectory() as saved:
    model.save_pretrained(saved)
    again = from_pretrained(saved, dtype=torch.float32)
    print("loaded model gives the same logits:", torch.equal(model(ids).logits, again(ids).logits))
