"""Time other implementations of elu1, where they are installed, and check them against ours first.

Each gets the same raw queries, keys and values, applies elu(x) + 1 itself as its users do, and hands back
`[B, N, H, Dv]`. None of them is needed; one that is missing, or that cannot run here, says why.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .candidates import Candidate, RandomInputs, random_inputs, trained
from .config import BenchConfig
from .series import short

CHUNK = 64
TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
"""Root mean square of the difference over that of the outputs; peers sum in other orders, some add 1e-6."""
PROBE = 256
"""Tokens on which agreement is looked at: a multiple of every peer's chunk."""
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """Raised where a peer cannot run; the text says why."""


def _imported(module: str, package: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, about drivers and names that torch has moved
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == module.partition(".")[0]:
            raise Unavailable(f"not installed: pip install {package}") from error
        raise Unavailable(f"installed, but {error.name} is missing") from error
    except Exception as error:  # other people's imports compile code and look for drivers
        raise Unavailable(f"cannot be imported: {short(error)}") from error


def _fla(config: BenchConfig) -> Form:
    if torch.device(config.device).type != "cuda":
        raise Unavailable("its kernels run on CUDA only; on a CPU see fla-naive")
    function = _imported("fla.ops.linear_attn", "flash-linear-attention").chunk_linear_attn

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        return function(*tensors, scale=1.0, normalize=True)[0]  # type: ignore[no-any-return]

    return form


def _fla_naive(config: BenchConfig) -> Form:
    function = _imported("fla.ops.linear_attn.naive", "flash-linear-attention").naive_chunk_linear_attn
    if config.length % CHUNK:
        raise Unavailable(f"takes multiples of {CHUNK} tokens")

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        return function(*tensors, scale=1.0, normalize=True)  # type: ignore[no-any-return]

    return form


def _fast_transformers(config: BenchConfig) -> Form:
    if config.dtype != "float32":
        raise Unavailable("its causal product takes float32 only")
    function = _imported("fast_transformers.causal_product", "pytorch-fast-transformers").causal_dot_product

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # as its CausalLinearAttention does, without its 1e-6
        total = torch.einsum("bhnd,bhnd->bhn", query, key.cumsum(2))
        output: Tensor = function(*(x.contiguous() for x in (query, key, value))) / total.unsqueeze(-1)
        return output.transpose(1, 2).contiguous()

    return form


def _performer(config: BenchConfig) -> Form:
    module = _imported("performer_pytorch.performer_pytorch", "performer-pytorch")

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = module.causal_linear_attention_noncuda(query, key, value)
        return output.transpose(1, 2).contiguous()

    return form


def vectorised(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Features `[B, H, N, D]` and values to `[B, N, H, Dv]`, all chunks at once, to be compiled."""
    length = query.shape[2]
    spare = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, spare)).unflatten(2, (-1, CHUNK)) for x in (query, key, value))
    S = F.pad((k.mT @ v).cumsum(2), (0, 0, 0, 0, 1, 0))[:, :, :-1]
    z = F.pad(k.sum(3).cumsum(2), (0, 0, 1, 0))[:, :, :-1]
    scores = (q @ k.mT).tril()
    total = scores.sum(-1, keepdim=True) + q @ z.unsqueeze(-1)
    output: Tensor = ((scores @ v + q @ S) / total).flatten(2, 3)[:, :, :length]
    return output.transpose(1, 2).contiguous()


def _compiled(config: BenchConfig) -> Form:
    # sizes are constants: what a user gets who compiles for one length. Forgotten before each setting, since
    # after eight of them dynamo would quietly run the function as it is
    torch.compiler.reset()
    form: Form = torch.compile(vectorised, dynamic=False)
    return form


PEERS: dict[str, Callable[[BenchConfig], Form]] = {
    "fla": _fla,
    "fla-naive": _fla_naive,
    "fast-transformers": _fast_transformers,
    "performer": _performer,
    "torch.compile": _compiled,
}
"""Name in tables -> its function of features and values, all `[B, H, N, D]`, to `[B, N, H, Dv]`."""


def candidates(
    config: BenchConfig, seed: int = 0, names: Sequence[str] = tuple(PEERS)
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the peers that can run, on the tensors of `build`; and name -> why not, or what differs."""
    ready: list[Candidate] = []
    notes: dict[str, str] = {}
    if not config.causal or config.kind == "decode":  # compared in causal prefill and training only
        return ready, notes
    tensors = lru_cache(partial(random_inputs, config, seed))
    for name in names:
        try:
            form = PEERS[name](config)
            difference = _agreement(form, config, seed)
            call = _called(form, config, tensors())
        except Unavailable as error:
            notes[name] = str(error)
            continue
        except Exception as error:  # a peer that fails is a row without numbers, not the end of the run
            notes[name] = f"failed: {short(error)}"
            continue
        if difference:
            notes[name] = difference
        ready.append(Candidate(name, call, linear=True))
    return ready, notes


def _features(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply elu(x) + 1, and repeat key heads where queries share them: no peer takes fewer."""
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return F.elu(query) + 1, F.elu(key) + 1, value


def _called(form: Form, config: BenchConfig, tensors: RandomInputs) -> Callable[[], Tensor]:
    three = (tensors.query, tensors.key, tensors.value)
    if config.kind == "train":
        return trained(lambda: form(*_features(*three)), list(three), tensors.gradient)
    return torch.no_grad()(lambda: form(*_features(*three)))


def _agreement(form: Form, config: BenchConfig, seed: int) -> str:
    """Return nothing where the output is elu1's within the tolerance, else in words what it is."""
    probe = BenchConfig(config.shape, "prefill", min(PROBE, config.length), True, config.dtype, config.device)
    tensors = random_inputs(probe, seed)
    with torch.no_grad():
        output = form(*_features(tensors.query, tensors.key, tensors.value)).cpu().double()
        numerator, total = _definition(tensors)
    tolerance = TOLERANCE[config.dtype]
    error = _distance(output, numerator / total)
    if error <= tolerance:
        return ""
    if _distance(output, numerator) <= tolerance:
        return "computes something else: elu1 without its normaliser"
    scale = config.shape.head_dim**-0.5
    if _distance(output, numerator * scale) <= tolerance:
        return "computes something else: elu1 without its normaliser, times 1/sqrt(D)"
    return f"computes something else: its output is {error:.2g} away from elu1's (tolerance {tolerance:g})"


def _definition(tensors: RandomInputs) -> tuple[Tensor, Tensor]:
    """Return numerator `[B, N, H, Dv]` and total of elu1 by N x N weights, in float64 on the CPU."""
    three = (x.cpu().double() for x in (tensors.query, tensors.key, tensors.value))
    query, key, value = _features(*three)
    weights = (query @ key.mT).tril()
    return (weights @ value).transpose(1, 2), weights.sum(-1, keepdim=True).transpose(1, 2)


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt())
