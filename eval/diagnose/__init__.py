"""`python -m hf_linattn.eval.diagnose`: what each head attends to."""
