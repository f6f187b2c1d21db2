"""`python -m hf_linattn.eval.recall`: can a model find again what it read?

rows = measure_recall(model, tokenizer, ("induction", "passkey"), (512, 1024))
"""

from .measure import Row, measure_recall

__all__ = ["Row", "measure_recall"]
