"""`python -m hf_linattn.finetune`: train a model, its attention patched or not, on text."""
