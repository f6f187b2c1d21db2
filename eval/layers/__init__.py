"""`python -m hf_linattn.eval.layers`: which layers of a linear model should stay softmax?

ranking = rank_layers(model, tokenizer, documents)
patch_model(original, plan_for(ranking, 4))
"""

from .measure import Recall
from .ranking import Ranking, plan_for, plan_of
from .schedule import rank_layers

__all__ = ["Ranking", "Recall", "plan_for", "plan_of", "rank_layers"]
