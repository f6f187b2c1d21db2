"""nope: the model's rotary embedding switched off."""

from hf_linattn.attention import Modifier
from hf_linattn.attention.site import ROTARY_ARGUMENT, AttentionSite
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("nope")
class Nope(Modifier):
    """No positional encoding: queries and keys stay as they were before RoPE, so distance changes no score.

    s_ij = scaling q_i . k_j,  q_i and k_j without rotation; "nope+hedgehog": phi(q_i) . phi(k_j), likewise

    What a layer then knows of order comes from its causal mask and from the layers below. Layers that have no
    RoPE are refused, and so are sinks whose positions are those inside the cache of a window.

    Use: in a few softmax layers of a model whose other layers are linear and keep RoPE: keys far beyond the
        training length are then no stranger than near ones, and recall reaches further; "nope+logn" keeps
        them sharp. The scores lose what they knew of position: train afterwards.

    Source: "The Impact of Positional Encoding on Length Generalization in Transformers", Kazemnejad et al.
        2023, arXiv:2305.19466; beside linear layers: HALO, arXiv:2601.22156.
    """

    group = "position"
    rope = False

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site)
        if ROTARY_ARGUMENT not in site.forward_info.parameters:
            raise OptionError(
                f"{site.name}: 'nope' switches the rotary embedding off, and "
                f"{type(site.module).__name__} is given none. Leave it out of the plan."
            )
