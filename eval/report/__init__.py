"""`python -m hf_linattn.eval.report`: result folders on one page."""
