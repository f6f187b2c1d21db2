"""Make one attention module without projections, patched like any model, something that can be timed.

What a candidate does is what a patched module of a model does between its projections: the pre-hook finds
the cache, the module stores its keys, the attention interface routes the call, the mask that the model made
once is read, the output comes back as `[B, N, H, Dv]`. The reference is the same module without a patch,
under transformers' `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_linattn.attention import Attention
from hf_linattn.errors import OptionError
from hf_linattn.patching.cache_layers import CACHE_NAME
from hf_linattn.patching.patch import patch_model
from hf_linattn.registry import names_in, options_for, parse, refuse_unused

from .config import IN_PLACE, SDPA, BenchConfig, Shape
from .timing import Timed

TRAINED = 512
"""`max_position_embeddings` of the bare model, for patches that ask how long a model was trained."""


class BareConfig(PreTrainedConfig):
    """Sizes of `BareModel`."""

    model_type = "linattn-bare"

    def __init__(self, shape: Shape | None = None, causal: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if shape is not None:
            self.num_attention_heads, self.num_key_value_heads = shape.heads, shape.kv_heads
            self.head_dim, self.hidden_size = shape.head_dim, shape.heads * shape.head_dim
            self.v_head_dim, self.num_hidden_layers = shape.value_dim, 1
        self.causal, self.max_position_embeddings = causal, TRAINED


class BareAttention(nn.Module):
    """What stands between the projections of transformers' attention modules."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, 0, config.causal
        self.head_dim, self.v_head_dim = config.head_dim, config.v_head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Attend, as a module of transformers does between its projections; `[B, N, H, Dv]`.

        Args:
            query: `[B, H, N, D]`.
            key: `[B, Hkv, N, D]`.
            value: `[B, Hkv, N, Dv]`.
            attention_mask: from `BareModel.mask`.
            cache: of transformers.
        """
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attention_interface: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output: Tensor = attention_interface(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling
        )[0]
        return output


class BareModel(PreTrainedModel):
    """One `BareAttention`; patched by `patch_model` like any other model."""

    config_class = BareConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attention = BareAttention(config)

    def mask(self, batch: int, length: int, like: Tensor, cache: Any = None) -> Tensor | None:
        """Make the mask that a model makes once for all its layers.

        Args:
            batch: B.
            length: N, of the queries.
            like: a tensor of the same dtype and device.
            cache: that holds the tokens before them.
        """
        embeddings = like.new_empty(batch, length, 1)
        make: Any = create_causal_mask if self.config.causal else create_bidirectional_mask
        mask: Tensor | None = make(
            config=self.config, inputs_embeds=embeddings, attention_mask=None, **{CACHE_NAME: cache}
        )
        return mask


@dataclass
class Candidate(Timed):
    """One way to compute what the others compute too; its call gives the output `[B, N, H, Dv]`.

    Attributes:
        linear: its time is known to grow with the length, not with its square.
        model: the module behind it, for the work it does; None where there is none of ours.
    """

    linear: bool = False
    model: BareModel | None = None


@dataclass(frozen=True)
class RandomInputs:
    """Random queries, keys and values `[B, H or Hkv, N, D or Dv]`, the output's gradient `[B, N, H, Dv]`.

    The first three are views of `[B, N, H, D]`, as projections leave them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor


def random_inputs(config: BenchConfig, seed: int = 0) -> RandomInputs:
    """Draw the same numbers on every machine; decoding gets the tokens before and one more."""
    shape, generator = config.shape, torch.Generator().manual_seed(seed)
    length = config.length + (config.kind == "decode")
    dtype, wants = getattr(torch, config.dtype), config.kind == "train"

    def draw(heads: int, width: int, leaf: bool = True) -> Tensor:
        x = torch.randn(shape.batch, length, heads, width, generator=generator).to(config.device, dtype)
        return x.transpose(1, 2).requires_grad_(wants) if leaf else x

    return RandomInputs(
        draw(shape.heads, shape.head_dim),
        draw(shape.kv_heads, shape.head_dim),
        draw(shape.kv_heads, shape.value_dim),
        draw(shape.heads, shape.value_dim, leaf=False),
    )


def check(specs: Sequence[str], options: dict[str, Any], causal: bool) -> None:
    """Check that patches exist, go in this direction and take the options, before any work.

    Raises:
        UnknownPatchError, OptionError: of a name or an option; also a patch of the other direction.
    """
    wanted = "causal" if causal else "bidirectional"
    refuse_unused(specs, options)
    for part in (part for spec in specs for part in parse(spec, own_options(spec, options)).parts):
        if issubclass(part, Attention) and part.directions not in ("both", wanted):
            advice = "add --bidirectional" if causal else "leave --bidirectional out"
            reason = f"{part.directions} only ({part.direction_reason})"
            raise OptionError(f"{part.name!r} is {reason}: {advice}, or leave it out")


def own_options(spec: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return those of the shared options that are for this composition.

    Raises:
        UnknownPatchError, OptionError: of its names.
    """
    return options_for(names_in(spec), options or {})


def build_bare(
    config: BenchConfig, spec: str | None = None, options: dict[str, Any] | None = None
) -> BareModel:
    """Build the bare model of these sizes, patched unless `spec` is None.

    Raises:
        LinattnError: the patch does not suit.
    """
    model = BareModel(BareConfig(config.shape, config.causal, attn_implementation="sdpa"))
    if spec is not None:
        patch_model(model, spec, options=own_options(spec, options))
    module: Any = model
    module.to(config.device, getattr(torch, config.dtype)).eval()
    return model


def _candidate(model: BareModel, name: str, config: BenchConfig, tensors: RandomInputs) -> Candidate:
    linear = _is_linear(model)
    if config.kind == "decode":
        step, around = _decoding(model, config, tensors)
        return Candidate(name, step, around, linear=linear, model=model)
    mask = model.mask(config.shape.batch, config.length, tensors.query)
    three = [tensors.query, tensors.key, tensors.value]

    def forward() -> Tensor:
        return model.attention(*three, mask)  # type: ignore[no-any-return]

    if config.kind == "prefill":
        step = torch.no_grad()(forward)
    else:
        step = trained(forward, [*three, *model.parameters()], tensors.gradient)
    return Candidate(name, step, linear=linear, model=model)


def trained(forward: Callable[[], Tensor], leaves: list[Tensor], gradient: Tensor) -> Callable[[], Tensor]:
    """Return a forward pass with the gradients of these tensors; nothing accumulates."""

    def step() -> Tensor:
        output = forward()
        torch.autograd.grad(output, leaves, gradient, allow_unused=True)
        return output.detach()

    return step


def _is_linear(model: BareModel) -> bool:
    """Tell whether its state is of constant size."""
    child: Any = model.attention._modules.get("linattn")
    return child is not None and bool(child.keeps_state)


def _decoding(
    model: BareModel, config: BenchConfig, tensors: RandomInputs
) -> tuple[Callable[[], Tensor], Callable[[], AbstractContextManager[None]]]:
    """Return one token behind a cache that is put back after it, and a context that restores its numbers."""
    cache, batch, past = DynamicCache(), config.shape.batch, config.length
    old = [x[:, :, :past] for x in (tensors.query, tensors.key, tensors.value)]
    new = [x[:, :, past:] for x in (tensors.query, tensors.key, tensors.value)]
    with torch.no_grad():
        if _is_linear(model):
            model.attention(*old, model.mask(batch, past, tensors.query, cache), cache)
        else:
            cache.update(old[1], old[2], 0)
        mask = model.mask(batch, 1, tensors.query, cache)
    references, numbers = put_back(cache)

    @torch.no_grad()
    def step() -> Tensor:
        output: Tensor = model.attention(*new, mask, cache)
        references()
        return output

    @contextmanager
    def around() -> Iterator[None]:
        yield
        numbers()

    return step, around


def put_back(cache: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two calls that make a cache again what it is now: its references, the numbers in its states.

    Keys are put back by reference, which takes no time worth measuring. States keep their size while decoding
    writes over them, so their numbers can wait until nothing is timed. What a first token finds out for the
    next ones stays, as it does in a text.
    """
    before = [{k: v for k, v in vars(layer).items() if k != "prepared"} for layer in cache.layers]
    states = [(x, x.clone()) for values in before for x in values.get("state") or ()]

    def references() -> None:
        for layer, values in zip(cache.layers, before, strict=True):
            vars(layer).update(values)

    def numbers() -> None:
        for x, saved in states:
            x.copy_(saved)

    return references, numbers


def _in_place(model: BareModel, config: BenchConfig, tensors: RandomInputs) -> Candidate:
    """Make SDPA over keys that are there already a candidate: a decoded token without what the cache does."""
    query = tensors.query[:, :, config.length :]
    key, value = tensors.key.contiguous(), tensors.value.contiguous()
    return Candidate(IN_PLACE, torch.no_grad()(lambda: model.attention(query, key, value, None)))


def build(
    config: BenchConfig, specs: list[str], options: dict[str, Any] | None = None, seed: int = 0
) -> list[Candidate]:
    """Build the reference first, then the patches; all of them on the same tensors.

    Args:
        config: sizes and kind of the call.
        specs: names of patches.
        options: of the patches; each gets those that it has.
        seed: of the tensors and of maps that are drawn.

    Raises:
        LinattnError: a patch does not suit these sizes.
    """
    return [make() for _, _, make in entries(config, specs, options, seed)]


def entries(
    config: BenchConfig, specs: list[str], options: dict[str, Any] | None = None, seed: int = 0
) -> Iterator[tuple[str, bool, Callable[[], Candidate]]]:
    """Yield what `build` builds one by one: name, whether it is linear, and what makes it.

    Making one calls it, where something comes before what is timed, so that it can fail by itself. Arguments
    as of `build`.

    Raises:
        LinattnError: a patch does not suit these sizes.
    """
    tensors = lru_cache(partial(random_inputs, config, seed))  # drawn by the first that is made, if any is
    reference = build_bare(config)
    yield SDPA, False, lambda: _candidate(reference, SDPA, config, tensors())
    if config.kind == "decode":
        yield IN_PLACE, False, lambda: _in_place(reference, config, tensors())
    for spec in specs:
        torch.manual_seed(seed)  # of maps that are drawn
        model = build_bare(config, spec, options)
        yield (
            spec,
            _is_linear(model),
            lambda model=model, spec=spec: (  # type: ignore[misc]
                _candidate(model, spec, config, tensors())
            ),
        )
