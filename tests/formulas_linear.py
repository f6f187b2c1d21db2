"""Formulas of the patches: quadratic, float64, one function each."""

from oracle import Case

CASES: dict[str, Case] = {}
