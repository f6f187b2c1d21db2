"""Base classes of attentions, and what one call gives them.

from hf_linattn.attention import LinearAttention
"""

from hf_linattn.attention.base import SCORE_EXTRAS, SINKS, Attention, Modifier, Output, Patch
from hf_linattn.attention.call import Call
from hf_linattn.attention.linear import LinearAttention
from hf_linattn.attention.scores import ScoreAttention
from hf_linattn.attention.site import AttentionSite
from hf_linattn.attention.stateful import StatefulAttention
from hf_linattn.attention.tokens import Tokens, upcast

__all__ = [
    "SCORE_EXTRAS",
    "SINKS",
    "Attention",
    "AttentionSite",
    "Call",
    "LinearAttention",
    "Modifier",
    "Output",
    "Patch",
    "ScoreAttention",
    "StatefulAttention",
    "Tokens",
    "upcast",
]
