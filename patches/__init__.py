"""One attention per file; `hf_linattn.registry` finds them."""
