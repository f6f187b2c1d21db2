"""Definitions of all patches in float64."""
