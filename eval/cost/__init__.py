"""`python -m hf_linattn.eval.cost`: bytes of state and tokens per second beside the unpatched model."""
