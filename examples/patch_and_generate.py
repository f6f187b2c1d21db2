"""Swap a model's attention, let it write, take the swap back.

python examples/patch_and_generate.py [MODEL] [PATCH]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import describe, patch_model, unpatch_model

folder = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "base")
patch = sys.argv[2] if len(sys.argv) > 2 else "softmax1"

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("def main(argv=None):\n", return_tensors="pt", return_token_type_ids=False)
before = model(**inputs).logits

patch_model(model, patch)
print(describe(model))

out = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)
print(tokenizer.decode(out[0]))

unpatch_model(model)
print("logits after unpatching are bit-identical:", torch.equal(model(**inputs).logits, before))
