"""Who is told what a search does next."""

from __future__ import annotations

from collections.abc import Callable

# Called with what is done next, and whether that is of interest only until the next is said.
Says = Callable[[str, bool], None]


def silent(what: str, is_passing: bool) -> None:
    """Say nothing."""
