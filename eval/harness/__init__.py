"""`python -m hf_linattn.eval.harness`: lm-evaluation-harness on patched models."""
