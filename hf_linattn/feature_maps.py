"""Feature maps by the name of the patch that they come from, for attentions that take one as an option."""

from __future__ import annotations

from hf_linattn.attention import LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import patches
from hf_linattn.sites import Site

BEYOND_MAPS = ("log_decay", "mapped", "sums", "causal", "both_ways", "absorb", "attend")
"""What a patch that is made of feature maps alone leaves as it is."""


def feature_maps() -> dict[str, type[LinearAttention]]:
    """The registered linear patches that are made of feature maps alone, by name."""
    return {
        name: cls
        for name, cls in patches().items()
        if issubclass(cls, LinearAttention)
        and all(getattr(cls, part) is getattr(LinearAttention, part) for part in BEYOND_MAPS)
    }


def named_map(option: str, name: str, site: Site) -> LinearAttention:
    """The patch of this name with its default options, whose maps are to be used.

    Args:
        option: the option that names it, for the error.
        name: a linear patch made of feature maps alone, which divides by its sum.
        site: the module that it is for.

    Raises:
        OptionError: no such patch, or it makes other demands.
    """
    fitting = {known: cls for known, cls in feature_maps().items() if cls.summed}
    if name not in fitting:
        raise OptionError(
            f"{option}={name!r} is no linear patch made of a feature map alone; there are "
            f"{', '.join(fitting)}"
        )
    return fitting[name](site)
