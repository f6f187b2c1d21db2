"""Whether fla's kernels of the delta rule may be used: they are held to float64 as our own kernels are."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import torch
from torch import Tensor

from hf_linattn.ops.fla import rule, selftest
from hf_linattn.ops.fla.selftest import Key
from hf_linattn.ops.triton import check, launch

OLDEST = (0, 5, 2)
"""Of fla-core: older ones were not tried."""
WIDEST = 256
MOST_NUMBERS = 2**31 - 1
"""Of a tensor: addresses of some of its kernels are 32 bits wide."""
MOST_ROWS = 65535
"""Rows times heads: the second axis of a grid."""
ABSENT = "fla-core is not installed (pip install 'hf-linattn[gpu]')"
PARTS = ("fla-core", "flash-linear-attention", "flash-qla", "flash-kda", "tilelang")
"""Packages that some of its functions are computed by."""


class DeltaChecks(check.Checks):
    """Verdicts on fla's kernels.

    Args:
        kernels: has `causal`, as `rule` does.
        length: tokens of the trial.
    """

    form = "fla"
    kernels_of = "fla's kernels of the delta rule"
    most_tokens, most_rows = MOST_NUMBERS, MOST_ROWS

    def __init__(self, kernels: object = rule, length: int = selftest.LENGTH) -> None:
        super().__init__(kernels, length)

    def refusal(self, key: Key, tokens: int, rows: int) -> str | None:
        """Say what is known to hinder; `tokens` counts the numbers of the largest tensor."""
        if not launch.available(key.device):
            return "triton is not installed"
        why = _missing(key.kind, key.recurrent) or check.triton_too_old()
        if why is not None:
            return why
        if key.dtype not in selftest.SIGNIFICAND:
            return f"they take float32, bfloat16 and float16, not {key.dtype}"
        if key.dtype == torch.float32 and not key.recurrent:
            return "in chunks they multiply in 16 bits or TF32, which float32 models would notice"
        if max(key.D, key.Dv) > WIDEST:
            return f"they take heads, or features, of at most {WIDEST}, not {key.D} and {key.Dv}"
        if tokens > MOST_NUMBERS:
            return f"they take tensors of at most {MOST_NUMBERS:,} numbers, not {tokens:,}"
        if rows > MOST_ROWS:
            return f"they take at most {MOST_ROWS:,} rows times heads, not {rows:,}"
        return check.device_refusal(key.device, "bf16" if key.dtype == torch.bfloat16 else "ieee")

    def worth_saying(self, why: str) -> bool:
        """Tell whether somebody would wonder: fla is an extra, and kernels of float64 nobody expects."""
        return why != ABSENT and super().worth_saying(why)

    def disagreement(self, key: Key) -> str | None:
        """Run the trial and say what differs from float64; None where nothing does."""
        return selftest.disagreement(key, self.kernels, self.length)

    def file(self, device: torch.device) -> Path | None:
        """Name the file of verdicts; None where no folder can be found."""
        own = (path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
        return check.verdicts_file(device, "fla", *map(_version, PARTS), *own)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _missing(kind: rule.Kind, recurrent: bool) -> str | None:
    """Say why fla cannot be called at all; None where it can."""
    version = _version("fla-core")
    if importlib.util.find_spec("fla") is None or not version:
        return ABSENT
    try:
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
            return f"fla-core {version} is older than {'.'.join(map(str, OLDEST))}"
        rule.function(kind, recurrent)
    except Exception as error:  # whatever its import raises
        line = next((x.strip() for x in str(error).splitlines() if x.strip()), "")
        return f"fla-core {version} cannot be used ({type(error).__name__}: {line[:300]})"
    return None


DELTA = DeltaChecks()
"""Of the kernels that are used."""
check.ALL.append(DELTA)


def takes(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> bool:
    """Tell whether fla's kernels compute a call of `rule.causal`, see `Checks.takes`.

    Raises:
        OptionError: `HF_LINATTN_TRITON` is neither 0 nor 1.
        UnsupportedCallError: it is 1, and they cannot.
    """
    given = [x for x in (query, key, value, beta, log_decay, state) if x is not None]
    if not all(type(x) is Tensor for x in given) or not all(x.numel() for x in given):
        return False  # a fake or distributed tensor has no memory to read
    heads = (key if query is None else query).shape[1]
    batch, _, length, D = key.shape
    kind, recurrent = (
        rule.kind_of(log_decay, documents),
        rule.is_recurrent(query, key, value, beta, log_decay, state),
    )
    about = Key(key.device, value.dtype, D, value.shape[-1], kind, recurrent)
    largest = batch * heads * length * max(D, value.shape[-1])
    return DELTA.takes(about, largest, batch * heads)
