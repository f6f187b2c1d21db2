"""Stage `kernels`: our kernels beside torch operations, softmax and fla; then tiles are measured."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_linattn.eval.bench.candidates import _decoding, build_bare, random_inputs
from hf_linattn.eval.bench.config import BenchConfig
from hf_linattn.eval.bench.config import Shape as Sizes
from hf_linattn.ops import linear_attention
from hf_linattn.ops.triton import launch
from hf_linattn.ops.types import Inputs, OpConfig

from . import autotuned, choosing, tiles, timing, windows
from .work import Case, Context, Row, Skip, kernels, needs_triton

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Sizes of one attention."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int


SHAPES = (
    Shape(1, 32, 32, 8192, 128),
    Shape(8, 16, 16, 2048, 64),
    Shape(1, 32, 32, 2048, 128),
    Shape(1, 9, 3, 8192, 64),
    Shape(1, 32, 8, 8192, 128),
    Shape(1, 8, 8, 8192, 64),
    Shape(1, 96, 96, 8192, 128),
    Shape(4, 16, 16, 2048, 128),
    Shape(2, 16, 16, 16384, 128),
    Shape(1, 32, 32, 65536, 128),
    Shape(1, 16, 16, 4096, 256),
)
"""The fourth has the heads of the small one of stage `models`, which finds kernels compiled then."""
FIRST = SHAPES[:3]
"""Those that come before all others; the first one, fla with it, before decoding."""
TUNED = (SHAPES[0], SHAPES[1], SHAPES[-1])
"""Shapes at which fla's configurations are compiled in advance: the first of each width, by which most are
chosen."""
DECODES = (
    Shape(1, 32, 8, 8192, 128),
    Shape(32, 32, 8, 8192, 128),
    Shape(8, 16, 16, 2048, 64),
    Shape(1, 9, 3, 8192, 64),
)
TOKENS = 2
"""Of them, that come before other shapes than the first."""
TINY = Shape(1, 2, 1, 24, 16)


def cases(context: Context) -> list[Case]:
    """List what the machine can do, then the main shape, a token, other shapes, fla there, and tiles."""
    timing.prepare(context.device)
    machine = Case({"case": "machine"}, partial(timing.machine, context.device))
    shapes, first, decodes = (SHAPES, FIRST, DECODES) if not context.dry else ((TINY,), (TINY,), (TINY,))
    rows = {(name, shape): _case(context, name, shape) for shape in shapes for name in FORMS}
    tokens = [_token_case(context, name, shape) for shape in decodes for name in DECODING]
    most = TOKENS * len(DECODING)

    def take(wanted: Callable[[str, Shape], bool]) -> list[Case]:
        return [rows.pop(key) for key in list(rows) if wanted(*key)]

    return [
        machine,
        *take(lambda name, shape: shape == first[0]),
        *tokens[:most],
        *take(lambda name, shape: shape in first and name not in THEIRS),
        *tokens[most:],
        *take(lambda name, shape: name not in THEIRS),
        *take(lambda name, shape: True),
        *tiles.cases(context),
    ]


def _case(context: Context, name: str, shape: Shape) -> Case:
    compiles: tuple[Any, ...] = ()
    if name in OURS:
        compiles = ((compile_row, (name, shape)),)
    elif name in MODULES:
        compiles = _module_calls(compile_row, name, shape)
    elif name == THEIRS[0] and shape in TUNED:
        compiles = tuple((compile_theirs, (shape, part)) for part in range(autotuned.PARTS))
    return Case({"case": name, **shape._asdict()}, partial(_row, context, name, shape), compiles)


def _token_case(context: Context, name: str, shape: Shape) -> Case:
    compiles = ((compile_token, (name, shape)),) if name in OUR_TOKENS else ()
    if name in MODULES:
        compiles = _module_calls(compile_token, name, shape)
    case = {"case": name, "token": True, **shape._asdict()}
    return Case(case, partial(_token, context, name, shape), compiles)


def _module_calls(call: Callable[..., None], name: str, shape: Shape) -> tuple[Any, ...]:
    """List what a module needs: its kernels, and the checks that come before them."""
    trials = [(choosing.compile_check, (call, (name, shape), number)) for number in range(MODULES[name])]
    return ((call, (name, shape)), *trials)


def _inputs(context: Context, shape: Shape, length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)

    def new(heads: int) -> Tensor:
        x = torch.randn(shape.batch, length, heads, shape.width, device=context.device).to(context.dtype)
        return x.transpose(1, 2).requires_grad_()

    return new(shape.heads), new(shape.kv_heads), new(shape.kv_heads)


def _row(context: Context, name: str, shape: Shape) -> Row:
    """Time forward, and forward with backward, of one form."""
    call, q, k, v = FORMS[name](context, shape), *_inputs(context, shape, shape.length)

    @torch.no_grad()
    def forward() -> Tensor:
        return call(q, k, v)

    gradient = torch.randn_like(forward())

    def backward() -> Any:
        return torch.autograd.grad(call(q, k, v), (q, k, v), gradient)

    row = timing.both(forward, context.device, "forward") | timing.both(backward, context.device, "both")
    return row | timing.peak(backward, context.device)


def compile_row(name: str, shape: Shape) -> None:
    """Compile what a row of our kernels launches, in a process without a device."""
    context = Context(False, "meta", Path(), Path())
    with choosing.kernels() if name in MODULES else nullcontext():
        call, inputs = FORMS[name](context, shape), _inputs(context, shape, shape.length)
        with torch.no_grad():
            call(*inputs)
        output = call(*inputs)
        torch.autograd.grad(output, inputs, torch.empty_like(output))


def compile_theirs(shape: Shape, part: int) -> None:
    """Compile a part of what fla's autotuner tries; what both forms need, the one with a normaliser has."""
    with autotuned.compiling(part):
        compile_row(THEIRS[1], shape)


def compile_token(name: str, shape: Shape) -> None:
    """Compile what a token of our kernels launches, likewise."""
    with torch.no_grad(), choosing.kernels() if name in MODULES else nullcontext():
        DECODING[name](Context(False, "meta", Path(), Path()), shape)[0]()


def _token(context: Context, name: str, shape: Shape) -> Row:
    """Time one token behind `length` tokens; the least is what its bytes take."""
    call, size = DECODING[name](context, shape)
    with torch.no_grad():
        return {"bytes": size, **timing.both(call, context.device, "token")}


def _ours(kind: str, normalise: bool, context: Context, shape: Shape) -> Call:
    needs_triton(context)
    config = OpConfig(kind, 0.0, normalise)
    return lambda q, k, v: linear_attention.attention(Inputs(q, k, v), config, False, "triton").output


def _module(wish: str, patch: str, context: Context, shape: Shape) -> Call:
    """Make a patched module, as it stands in a model; with kernels or by torch operations."""
    if wish == "1" and context.device == "cpu":
        raise Skip("modules on a CPU do not use triton")
    model = build_bare(_config(context, shape, "train"), patch, _options(context, patch))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with kernels(wish):
            return model.attention(q, k, v, None).transpose(1, 2)

    return call


def _options(context: Context, patch: str) -> dict[str, Any]:
    return {"size": windows.span_of(context), "sinks": windows.SINKS} if patch.startswith("window") else {}


def _config(context: Context, shape: Shape, kind: Any) -> BenchConfig:
    sizes = Sizes(shape.batch, shape.heads, shape.kv_heads, shape.width, shape.width)
    return BenchConfig(
        sizes, kind, shape.length, True, str(context.dtype).removeprefix("torch."), context.device
    )


def _softmax(backend: Any, context: Context, shape: Shape) -> Call:
    if backend is SDPBackend.CUDNN_ATTENTION and context.device != "cuda":
        raise Skip("cuDNN runs on CUDA only")
    grouped = shape.heads != shape.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if context.device == "cuda" else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] == k.shape[2], enable_gqa=grouped
            )

    return call


def _fla(context: Context, name: str) -> Any:
    """Find a function of fla; its autotuner then takes less time."""
    if context.device not in ("cuda", "meta"):
        raise Skip("fla's kernels run on CUDA only")
    try:
        found = getattr(importlib.import_module("fla.ops.linear_attn"), name)
    except ImportError as error:
        raise Skip(f"fla is not there: {error}") from error
    if context.device == "cuda":
        autotuned.briefly()
    return found


def _theirs(maps: bool, context: Context, shape: Shape) -> Call:
    """Make fla's kernels: raw, or with elu1 and its normaliser as its users call them."""
    chunked = _fla(context, "chunk_linear_attn")
    times = shape.heads // shape.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if maps:
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if times > 1:  # it takes as many keys as queries
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return chunked(q, k, v, scale=1.0, normalize=maps)[0].transpose(1, 2)

    return call


FORMS: dict[str, Callable[[Context, Shape], Call]] = {
    "ours": partial(_ours, "elu1", True),
    "ours, raw": partial(_ours, "none", False),
    "ours, in a module": partial(_module, "1", "elu1"),
    "torch operations": partial(_module, "0", "elu1"),
    "softmax, flash": partial(_softmax, SDPBackend.FLASH_ATTENTION),
    "softmax, cuDNN": partial(_softmax, SDPBackend.CUDNN_ATTENTION),
    "fla, raw": partial(_theirs, False),
    "fla, elu1 and normaliser": partial(_theirs, True),
    "window, ours": partial(windows.ours, False),
    "window, sinks and sums, ours": partial(windows.ours, True),
    "window, in a module": partial(_module, "1", "window"),
    "window, torch operations": partial(_module, "0", "window"),
    "window+gated, in a module": partial(_module, "1", "window+gated"),
    "window+gated, torch operations": partial(_module, "0", "window+gated"),
}
"""Name -> its function of queries, keys and values, all `[B, H or Hkv, N, D]`."""
OURS = ("ours", "ours, raw", "window, ours", "window, sinks and sums, ours")
"""Those that are our kernels and nothing else."""
THEIRS = ("fla, raw", "fla, elu1 and normaliser")


def _ours_token(context: Context, shape: Shape) -> tuple[Callable[[], Any], int]:
    needs_triton(context)
    q, k, v = (x.detach() for x in _inputs(context, shape, 1))
    S = torch.rand(shape.batch, shape.kv_heads, shape.width, shape.width, device=context.device)
    inputs = Inputs(q, k, v, None, S, S[..., 0].contiguous())
    return lambda: launch.step(inputs, OpConfig("elu1")), 2 * S.nbytes + 2 * S[..., 0].nbytes


def _window_token(gated: bool, context: Context, shape: Shape) -> tuple[Callable[[], Any], int]:
    q, k, v = (x.detach() for x in _inputs(context, shape, 1))
    return windows.ours_token(gated, context, (q, k, v))


def _module_token(wish: str, patch: str, context: Context, shape: Shape) -> tuple[Callable[[], Any], int]:
    """Make a patched module decode, with what its cache does."""
    if wish == "1" and context.device == "cpu":
        raise Skip("modules on a CPU do not use triton")
    config = _config(context, shape, "decode")
    with kernels(wish):
        model = build_bare(config, patch, _options(context, patch))
        step, _ = _decoding(model, config, random_inputs(config))

    def call() -> None:
        with kernels(wish):
            step()

    state = 0 if patch == "window" else 8 * (shape.width + 1)  # read and written in float32
    ring = 2 * windows.span_of(context) * context.dtype.itemsize if patch.startswith("window") else 0
    return call, shape.batch * shape.kv_heads * shape.width * (state + ring)


def _softmax_token(context: Context, shape: Shape) -> tuple[Callable[[], Any], int]:
    q = _inputs(context, shape, 1)[0].detach()
    k, v = (x.detach().contiguous() for x in _inputs(context, shape, shape.length)[1:])
    call = _softmax(SDPBackend.FLASH_ATTENTION, context, shape)
    return lambda: call(q, k, v), k.nbytes + v.nbytes


def _their_token(context: Context, shape: Shape) -> tuple[Callable[[], Any], int]:
    recurrent, times = _fla(context, "fused_recurrent_linear_attn"), shape.heads // shape.kv_heads
    q, k, v = (x.detach() for x in _inputs(context, shape, 1))
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    S = torch.rand(shape.batch, shape.heads, shape.width, shape.width, device=context.device)

    def call() -> Any:
        maps = F.elu(q) + 1, F.elu(k) + 1
        return recurrent(*maps, v, scale=1.0, initial_state=S, output_final_state=True, normalize=False)

    return call, 2 * S.nbytes


DECODING: dict[str, Callable[[Context, Shape], tuple[Callable[[], Any], int]]] = {
    "ours": _ours_token,
    "ours, in a module": partial(_module_token, "1", "elu1"),
    "torch operations": partial(_module_token, "0", "elu1"),
    "softmax, flash": _softmax_token,
    "fla, elu1": _their_token,
    "window, ours": partial(_window_token, False),
    "window+gated, ours": partial(_window_token, True),
    "window, in a module": partial(_module_token, "1", "window"),
    "window+gated, in a module": partial(_module_token, "1", "window+gated"),
    "window+gated, torch operations": partial(_module_token, "0", "window+gated"),
}
"""Name -> its call of one token, and the bytes that it must move."""
OUR_TOKENS = ("ours", "window, ours", "window+gated, ours")
MODULES = {"ours, in a module": 1, "window, in a module": 2, "window+gated, in a module": 3}
"""Modules that take our kernels, and how many checks of the package come before a call, at most."""
