"""Attention arithmetic on tensors; nothing here knows of transformers."""
