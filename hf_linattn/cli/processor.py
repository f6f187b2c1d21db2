"""Which dtypes the processor multiplies well; a line for a run in one that it does not."""

from __future__ import annotations

import functools
import platform
import sys

import torch


def multiplies_bf16(cpu: bool) -> bool:
    """Tell whether this processor, or the GPU, multiplies bfloat16 itself: it is faster there.

    Args:
        cpu: the GPU is not used.
    """
    if torch.cuda.is_available() and not cpu:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    known = (torch.cpu._is_amx_tile_supported, torch.cpu._is_avx512_bf16_supported)
    return any(supported() for supported in known)


def is_slow(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether torch has no good products of a half precision on a device.

    An x86 processor without AVX512 (AVX2 alone, as most laptops have) multiplies matrices of bfloat16 5 to 15
    times slower than those of float32.
    """
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and not supported[dtype]()


@functools.cache
def note_slow(device: torch.device, dtype: torch.dtype, instead: str) -> None:
    """Say on stderr that a run would be faster in float32, where it would; once a process.

    Args:
        device: that the run is on.
        dtype: of its products.
        instead: the option that asks for float32.

    >>> note_slow(torch.device("cpu"), torch.float32, "--dtype float32")
    """
    if is_slow(device, dtype):
        name = str(dtype).removeprefix("torch.")
        sys.stderr.write(
            f"note: this processor has no fast products of {name}; {instead} reads and trains several times "
            "as fast here\n"
        )
