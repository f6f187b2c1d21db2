"""`python -m hf_linattn.eval.diagnose`: what every attention head does on a text.

diagnose(model, input_ids).grid("entropy")  # [layers, heads]
"""

from .measure import diagnose

__all__ = ["diagnose"]
