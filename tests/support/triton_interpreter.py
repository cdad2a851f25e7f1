"""Run kernel checks where Triton interprets its kernels on CPU tensors: a process of its own.

Triton reads TRITON_INTERPRET when it is imported, so the variable must be set before, and the
tests' own process must stay without it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest


def _begin() -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("error")


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Give `interpreted(function, *args)`: the result of a call in that process."""
    pytest.importorskip("triton", reason="triton is not installed: its interpreter cannot run")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)
