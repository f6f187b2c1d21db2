"""Can linear and sparse attention be combined? The same short fine-tuning for each, and for both together.

python examples/linear_and_sparse.py [MODEL [STEPS]]        (three minutes for 40 steps on one core)
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from hf_linattn import describe, from_pretrained
from hf_linattn.demo.stdlib_text import stdlib_files
from hf_linattn.eval.perplexity.measure import measure
from hf_linattn.finetune import FinetuneArguments, finetune

folder = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "base")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40
last = from_pretrained(folder).config.num_hidden_layers - 1
WINDOW = {"window": {"size": 64, "sinks": 4}}
RUNS = {
    "linear alone": ("elu1", None),
    "window alone": ("window", WINDOW),
    "both in every layer": ("window+elu1", WINDOW),
    "both, last layer softmax": ({f"0-{last - 1}": "window+elu1", str(last): "softmax"}, WINDOW),
}
held_out = [path.read_text(encoding="utf-8") for path in stdlib_files(held_out=True)[:4]]
with tempfile.TemporaryDirectory() as work:
    text = Path(work, "train.txt")
    text.write_text("\n".join(p.read_text("utf-8", "replace") for p in stdlib_files(held_out=False)[:20]))
    for name, (patch, options) in RUNS.items():
        out = f"{work}/{name}"
        run = {"max_steps": steps, "lr": 1e-3, "batch_size": 4, "eval_every": steps, "cpu": True}
        finetune(FinetuneArguments(folder, str(text), out, patch=patch, options=options, **run))
        model, tokenizer = from_pretrained(out), AutoTokenizer.from_pretrained(out)
        rows = measure(model, tokenizer, held_out, [512, 2048], max_tokens=8192)
        curve = ", ".join(f"{row.perplexity:.1f} at {row.length}" for row in rows)
        print(f"{name:25} {describe(model).state_bytes:9,} B constant   perplexity {curve}", flush=True)
