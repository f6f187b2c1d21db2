"""What older versions of transformers, which the package takes too, do otherwise by themselves."""

import transformers

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
"""Where transformers itself, unpatched too: does not empty a dynamic cache by `reset`, fails behind a sliding
window whose past is recorded, has no cache quantised to fp8, does not read what an adapter saves whole."""
