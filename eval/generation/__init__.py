"""`python -m hf_linattn.eval.generation`: text of a patched model beside the original's."""
