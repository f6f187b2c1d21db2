"""`python -m hf_linattn.eval.perplexity`: perplexity against the length of the context."""
