"""Processes of their own for triton, which must learn before its first import whether it interprets."""

import contextlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

HOW = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def begin():
    """Imported here, where triton interprets."""
    from helpers.triton_interpreter import patch_once

    patch_once()


@contextlib.contextmanager
def interpreter():
    """Calls a check in a process whose triton interprets; raises what it raises."""
    context = multiprocessing.get_context(HOW)
    if HOW == "forkserver":  # nothing else uses it: it starts here, with the variable, and imports once
        context.set_forkserver_preload(["transformers.modeling_utils"])
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()  # the process starts here, with the variable
        yield lambda check, *arguments: pool.submit(check, *arguments).result()
