"""`python -m hf_linattn.eval.layers`: which layers should stay softmax."""
