"""`python -m hf_linattn.eval.harness`: lm-evaluation-harness on patched models.

lm_eval.simple_evaluate(model=LinattnLM("tuned"), tasks=["lambada_openai"])
"""

__all__ = ["LinattnLM"]


def __getattr__(name: str) -> object:
    if name == "LinattnLM":  # needs lm_eval, an extra
        from .model import LinattnLM

        return LinattnLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
