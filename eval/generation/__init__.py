"""`python -m hf_linattn.eval.generation`: does a patched model still write the same?

compare_generation(original, {"elu1": patched}, tokenizer, prompts).summaries()
generate(model, tokenizer, prompts)
"""

from .measure import compare_generation
from .samples import generate

__all__ = ["compare_generation", "generate"]
