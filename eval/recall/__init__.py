"""`python -m hf_linattn.eval.recall`: does a model find again what it read?"""
