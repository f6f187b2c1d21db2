"""Processes of their own for triton, which must learn before its first import whether it interprets."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest


@pytest.fixture(scope="module")
def interpreted():
    """Calls a check in a process whose triton interprets; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()  # the process starts here, with the variable
        yield lambda check, *arguments: pool.submit(check, *arguments).result()
