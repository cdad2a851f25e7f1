"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 bucket`, `3 units`, `2,400 plans`.

    plural: of a noun that takes no "s".
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
