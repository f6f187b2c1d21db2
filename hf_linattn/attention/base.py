"""Base classes of patches: what one file in `patches/` fills in, and what it gets for that.

    LinearAttention    feature maps of query and key (`linear.py`) -> causal, bidirectional, cached, padded,
    StatefulAttention  any state of constant size (`stateful.py`)     packed: all else is done here
    ScoreAttention     weights of the scores, chosen keys, a sink logit (`scores.py`)
    Attention          anything else: output from a `Call`
    Modifier           changes query or scores before any of them

A patch is an `nn.Module`, made once per attention module. The keyword-only parameters of its constructor are
its options; its parameters, if any, are learned. Parameters are read inside `forward` only, where offloading
loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention.call import Call
from hf_linattn.attention.site import AttentionSite
from hf_linattn.errors import OptionError, UnsupportedCallError, UnsupportedModelError

Output = tuple[Tensor, Tensor | None]
SINKS = frozenset(("s_aux", "sinks"))
SCORE_EXTRAS = frozenset(("position_bias", "softcap", "indices", "attention_mask"))
"""What models do to their scores, as the attention interface names it: biases, caps, masks of an indexer."""


class PatchHolder(nn.Module):
    """A module that other libraries cannot put a wrapper into in the place of a patch."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), Patch) and not isinstance(value, Patch):
            raise UnsupportedModelError(
                f"the patch {name!r} cannot be replaced by a {type(value).__name__}: what a patch learns is "
                "trained whole. With peft: modules_to_save=['linattn'] in place of target_parameters"
            )
        super().__setattr__(name, value)


class Patch(PatchHolder):
    """A named change to attention, as `@register` knows it.

    Docstring, as docs/patches.md shows it: a one-line summary; the formula; prose; `Options:` with ranges;
    `Use:` when to take it; `Source:`.

    Class attributes:
        name: set by `@register`.
        group: heading in docs/patches.md.
        time: cost in the number of tokens n.
        directions: causal, bidirectional or both; direction_reason: the reason where it is one.
        linear: the state is of constant size.
        modifier: changes another attention instead of being one.
        identity: leaves the module's own attention in force.
        rope: False switches the model's rotary embedding off in its module.
        needs_hidden: reads the module's input, `call.hidden`.
        gates_by_value: makes gates of the values.
        keeps_gates: gates of past tokens are wanted again, by `call.gates`.
        takes_own_heads: what it computes by the number of heads it cuts down to `query_heads` or `key_heads`.
        joins_heads: why no head can be computed without the others; "" where each can.
        default_for: what `hf_linattn.convert` takes this patch for by default: "conversion" where none is
            named, "learned front" for a learned layer in front of another patch's map. Not inherited.

    Attributes:
        query_heads, key_heads: the module's heads that this process computes, where several share them.
    """

    name: ClassVar[str] = ""
    group: ClassVar[str] = "scores"
    time: ClassVar[str] = "O(n^2)"
    directions: ClassVar[Literal["both", "causal", "bidirectional"]] = "both"
    direction_reason: ClassVar[str] = ""
    linear: ClassVar[bool] = False
    modifier: ClassVar[bool] = False
    identity: ClassVar[bool] = False
    default_for: ClassVar[str] = ""
    rope: bool = True
    needs_hidden: bool = False
    gates_by_value: bool = False
    keeps_gates: bool = False
    takes_own_heads: ClassVar[bool] = False
    joins_heads: ClassVar[str] = ""
    query_heads: slice = slice(None)
    key_heads: slice = slice(None)

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()

    def extra_repr(self) -> str:
        """Show the name in `print(model)`."""
        return self.name


HOOK = "_hf_hook"
"""Attribute of a module that accelerate has given a hook."""


class Attention(Patch):
    """Base class of attentions: `attend` computes the output of a call.

    Class attributes:
        cross: also serves cross-attention.
        windowed: honours a sliding or chunked window of the model; else such layers keep their own attention.
        supports: keywords of the attention interface that it can honour; others are refused at patch time.
        wraps: takes a linear attention inside, as in "window+elu1".
        wrappable: can be that linear attention.
        needs_rope: turns queries by the model's rotary embedding, which must then be there.
        note: what `describe` says of this module beside options; "" for nothing.
    """

    cross: ClassVar[bool] = True
    windowed: ClassVar[bool] = False
    supports: ClassVar[frozenset[str]] = frozenset()
    wraps: ClassVar[bool] = False
    wrappable: ClassVar[bool] = False
    needs_rope: bool = False
    note: str = ""

    def attend(self, call: Call) -> Output:
        """Compute the output `[B, H, N, Dv]`, and the weights `[B, H, N, S]` or None."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def prepared_step(self, call: Call) -> Callable[[Tensor, Tensor, Tensor, int], Tensor | None] | None:
        """Return what computes the next tokens behind a call of one token; None for `attend` again.

        It takes query, key and value, in memory as the call's, and the number of tokens before, none of
        which is padding; it writes the state over and gives `[B, 1, H, Dv]`, or None, with nothing changed,
        where its weights are not as they were.
        """
        return None

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Any] | None:
        """Compute the first tokens of a text, none of them padding, on a CPU; None for `attend`.

        For calls without gradients, which nothing compiles. Gives the output `[B, H, N, Dv]`, and the state
        after, in memory of its own.
        """
        return None

    def wrap(self, inner: Attention) -> None:
        """Take in the linear attention that it is composed with."""
        raise OptionError(f"{self.name!r} holds no other attention")

    def whole_rows(self) -> str:
        """Say why rows cannot be split over processes; "" where they can."""
        return "it mixes the tokens of a whole row"

    def check(self) -> None:
        """Raise what its options lack, once it is known what it is composed with."""

    def forward(self, call: Call) -> Output:
        """Run `attend`: parameters are read below this, where offloading loads them."""
        offloaded = self.offloaded_inside()
        if not offloaded:
            return self.attend(call)
        with ExitStack() as stack:
            for module in offloaded:
                stack.enter_context(_loaded(module))
            return self.attend(call)

    def offloaded_inside(self) -> list[nn.Module]:
        """List the modules inside this one whose weights accelerate keeps elsewhere between calls."""
        if not self._modules or torch.compiler.is_compiling():
            return []
        found, left = [], list(self._modules.values())
        while left:  # half the time of `modules`, in every call
            module = left.pop()
            if module is not None:
                left += module._modules.values()
                if _offloads(module):
                    found.append(module)
        return found


def _offloads(module: nn.Module) -> bool:
    hook = module.__dict__.get(HOOK)
    return hook is not None and any(getattr(x, "offload", False) for x in getattr(hook, "hooks", (hook,)))


@contextmanager
def _loaded(module: Any) -> Iterator[None]:
    """Hold the weights of an offloaded module: accelerate loads them in its `forward` alone.

    An attention reads what lies inside it in other ways too, more than once in a call.
    """
    hook, hooked = module.__dict__[HOOK], module.__dict__["forward"]
    hook.pre_forward(module)
    module.forward = module._old_forward
    try:
        yield
    finally:
        module.forward = hooked
        hook.post_forward(module, None)


class Modifier(Patch):
    """Base class of changes to query, scores or output of the attention that they are composed with."""

    modifier = True

    def query_scale(self, visible: Tensor) -> Tensor:
        """Return the factor of each query, and so of its scores.

        Args:
            visible: number n_i of keys that query i sees, `[B or 1, 1 or H, N]`, float32 (float64 in float64
                models).

        Returns:
            Broadcast to `[B, H, N]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no query_scale")

    def scaling(self, scaling: float, head_dim: int) -> float:
        """Return the factor of the scores, in place of the model's."""
        return scaling

    def score_bias(self, distance: Tensor) -> Tensor:
        """Return what is added to the scores after scaling.

        Args:
            distance: tokens from key to query, `[B or 1, N, S]`, float32 (float64 in float64 models);
                negative for keys behind the query.

        Returns:
            Broadcast to `[B, H, N, S]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score_bias")

    def score_factor(self, distance: Tensor) -> Tensor:
        """Return what the scores are multiplied by after scaling, before any bias; as `score_bias`."""
        raise NotImplementedError(f"{type(self).__name__} has no score_factor")

    def log_gates(self, call: Call) -> Tensor:
        """Return the logarithm of what each token leaves of the weight of those before it.

        Returns:
            `[B, H, S]`, one for each key, float32 (float64 in float64 models); anything for padding.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log_gates")

    @classmethod
    def needs_scores(cls) -> bool:
        """Tell whether it has no meaning for an attention without scores."""
        changed = ("score_bias", "score_factor", "scaling", "log_gates")
        return any(getattr(cls, name) is not getattr(Modifier, name) for name in changed)

    @classmethod
    def changes_output(cls) -> bool:
        """Tell whether it changes the output."""
        return cls.output is not Modifier.output

    def output(self, call: Call, output: Tensor) -> Tensor:
        """Return the output in place of the attention's, `[B, H, N, Dv]`."""
        return output

    def forward(self, call: Call, output: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Return what changes the call, before the attention; or its output changed, after it.

        Nothing is written into the call here: what gathers weights around a module's forward (DeepSpeed)
        gathers them again for gradients of what it returned.
        """
        return self._changes(call) if output is None else self.output(call, output)

    def change(self, call: Call) -> None:
        """Change the call in place, before the attention."""
        changes = self(call)
        call.query = changes.get("query", call.query)
        call.scaling = self.scaling(call.scaling, call.query.shape[-1])
        if "gates" in changes:
            call.forget(changes["gates"])
        if "factor" in changes:
            call.stretch(changes["factor"])
        if "bias" in changes:
            call.add_bias(changes["bias"])

    def _changes(self, call: Call) -> dict[str, Tensor]:
        changes: dict[str, Tensor] = {}
        cls, query = type(self), call.query
        dtype = torch.promote_types(query.dtype, torch.float32)
        if cls.query_scale is not Modifier.query_scale:
            visible = call.visibility.count(call.device).to(dtype)
            changes["query"] = (query.to(dtype) * self.query_scale(visible).unsqueeze(-1)).to(query.dtype)
        biased, stretched, forgets = (
            getattr(cls, name) is not getattr(Modifier, name)
            for name in ("score_bias", "score_factor", "log_gates")
        )
        if (biased or stretched or forgets) and call.cross:
            raise UnsupportedCallError(
                f"{call.where}: {self.name!r} goes by distance, and queries and keys of cross-attention "
                "are of different texts. Leave it out: name modules of self-attention in the plan, such "
                "as '*.self_attn' or '*.SelfAttention' (describe(model) lists all)"
            )
        if forgets:
            changes["gates"] = self.log_gates(call)
        if biased or stretched:
            distance = call.distance().to(dtype)
            if stretched:
                changes["factor"] = self.score_factor(distance)
            if biased:
                changes["bias"] = self.score_bias(distance)
        return changes
