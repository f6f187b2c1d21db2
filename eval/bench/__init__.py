"""`python -m hf_linattn.bench`: how fast and how large is a patched attention, compared with softmax?

The parts are usable from Python too: `candidates.build` and `timing.measure` time any patches side by side,
as tests/ops/test_cost.py does.
"""
