"""The width that text views may use: the terminal's while a command prints, else their own.

Views that draw lanes, bars or columns ask `room()` and draw narrower. Without a limit a text is
the same on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_limit: ContextVar[int | None] = ContextVar("_limit", default=None)


@contextlib.contextmanager
def limited(columns: int | None) -> Iterator[None]:
    """Limit the lines of views to this many columns during the block; None is no limit."""
    token = _limit.set(columns)
    try:
        yield
    finally:
        _limit.reset(token)


def room(wanted: int, taken: int = 0, least: int = 8) -> int:
    """Return how many of the `wanted` columns fit next to those `taken`, but `least` of them."""
    limit = _limit.get()
    return wanted if limit is None else min(wanted, max(least, limit - taken))


def is_limited() -> bool:
    """Tell whether lines have a limit."""
    return _limit.get() is not None


def shortened(text: str, columns: int) -> str:
    """Return the text with its middle left out if it is longer than so many columns."""
    if len(text) <= columns:
        return text
    end = (columns - 1) // 2
    return f"{text[: columns - 1 - end]}…{text[len(text) - end :]}"
