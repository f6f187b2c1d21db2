"""Softmax over a window of recent tokens, alone or with a linear attention for the rest."""

from .window import Window

__all__ = ["Window"]
