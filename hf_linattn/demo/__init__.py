"""`python -m hf_linattn.demo`: patch, fine-tune and measure a small model, and write a page about it."""
