"""Settings of this process: Python's garbage collector, and the C library's heap."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from functools import cache

IN_HEAP_BYTES = 32 << 20
"""The largest block that a kept heap holds on a CPU; the system maps larger ones one by one."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_NEVER = -1
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@contextlib.contextmanager
def paused_collector(are_old: bool = False) -> Iterator[None]:
    """Pause the collection of reference cycles within the block.

    Tracing and the passes create millions of objects that stay alive. Searching them repeatedly for
    cycles took a third of the time or more (24 layers: capture 3.3 s, without collection 1.8 s).
    They are searched once after the block.

    are_old: count the objects of the block as old, so that only a search of all objects visits
        them. This is for imports, which leave nothing to collect.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if are_old and not gc.get_freeze_count():
            gc.freeze()  # moves all objects out of reach of the collector, without visiting them
            gc.unfreeze()  # and back, among the old ones
        if was_on:
            gc.enable()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let reference cycles be collected rarely within the block, whose graphs come and go.

    A search keeps the programs of many plans and drops those of others. Python's own settings took
    20 of its 145 seconds; without any collection its memory would grow with every plan.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def keep_heap() -> bool:
    """Let glibc keep what this process frees, from now on; return whether it does.

    A step allocates what the step before has freed. glibc gives memory above the last block in use
    back to the system after each step, and the next one faults it in again page by page, zeroed: up
    to a quarter of a small model's time. So it is told to keep its heap, like a GPU's allocator.

    Settings of the environment (`MALLOC_TRIM_THRESHOLD_` and others, or `GLIBC_TUNABLES`) win, and
    other C libraries are left alone. An allocator that was loaded in glibc's place ignores this.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    if "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    sets_limit = library.mallopt(_MMAP_THRESHOLD, IN_HEAP_BYTES)
    return bool(sets_limit and library.mallopt(_TRIM_THRESHOLD, _NEVER))
