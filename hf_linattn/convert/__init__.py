"""`python -m hf_linattn.convert`: change the attention of a model in stages that keep most of it."""
