"""`python -m hf_linattn.eval.perplexity`: perplexity against the length of the context.

    perplexity(PerplexityArguments(model="tuned", data="books/", output_dir="out", baseline=["original"]))

`measure.measure` does it for a model in memory, `compare_branches` for the parts of a hybrid.
"""

from .arguments import PerplexityArguments
from .branches import compare_branches

__all__ = ["PerplexityArguments", "compare_branches", "perplexity"]


def __getattr__(name: str) -> object:
    if name == "perplexity":  # draws pictures: matplotlib takes a while to load
        from .run import perplexity

        return perplexity
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
