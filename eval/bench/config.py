"""Describe what is measured: shapes, kinds of calls, and the texts that name them on the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "train", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "train", "decode")
DTYPES = ("float32", "bfloat16", "float16", "float64")

PEERS = ("fla", "fla-naive", "fast-transformers", "performer", "torch.compile")
"""Other implementations that can be compared with ours; see `peers`."""

SDPA = "sdpa"
IN_PLACE = "sdpa, keys in place"
"""Decoding without the cache's own work: what SDPA alone takes."""

SHAPE = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention module.

    Attributes:
        batch, heads, kv_heads: B, H, Hkv; H is a multiple of Hkv.
        head_dim, value_dim: D of queries and keys, Dv of values.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.kv_heads == self.heads else f"{self.heads}/{self.kv_heads}"
        tail = "" if self.value_dim == self.head_dim else f"x{self.value_dim}"
        return f"{self.batch}x{heads}x{self.head_dim}{tail}"


@dataclass(frozen=True)
class BenchConfig:
    """Everything that the candidates of one comparison have in common.

    Attributes:
        kind: `prefill` is a forward pass without gradients, `train` forward and backward, `decode` one token
            behind a cache of `length` tokens.
        length: N, in tokens.
        causal: False lets every query see all keys.
        dtype: of queries, keys and values; a name of torch.
        device: "cpu", "cuda", ...
    """

    shape: Shape
    kind: Kind
    length: int
    causal: bool = True
    dtype: str = "float32"
    device: str = "cpu"


def parse_shape(text: str) -> Shape:
    """Parse `1x8x64`, `1x32/8x128`, `1x8x64x128`.

    Raises:
        argparse.ArgumentTypeError: it is none, or its sizes do not fit each other.
    """
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape: write BATCHxHEADSxHEAD_DIM as in 1x8x64, key heads behind a slash as in "
            "1x32/8x128, another size of values at the end as in 1x8x64x128"
        )
    batch, heads, kv_heads, head_dim, value_dim = match.groups()
    shape = Shape(*map(int, (batch, heads, kv_heads or heads, head_dim, value_dim or head_dim)))
    if min(shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim) < 1:
        raise argparse.ArgumentTypeError(f"every size of a shape is at least 1, got {text!r}")
    if shape.heads % shape.kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {shape.heads} query heads cannot share {shape.kv_heads} key heads evenly"
        )
    return shape


def parse_shapes(text: str) -> list[Shape]:
    """Parse shapes by comma, each once."""
    return list(dict.fromkeys(parse_shape(part) for part in text.split(",")))


def choices(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Make a type of argparse: some of these words by comma, in the order in which they are known."""

    def parse(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        for part in parts:
            if part not in known:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
        return [name for name in known if name in parts]

    return parse
