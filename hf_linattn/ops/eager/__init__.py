"""Attention in plain torch: definitions in chunks, windows and over all keys."""
