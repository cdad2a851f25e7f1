"""Byte sizes: parse and format sizes such as `"40GiB"` (binary units)."""

from __future__ import annotations

import re

from zerofx.errors import PlanError

BINARY = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = BINARY | DECIMAL
SPELLING = {"KIB": "KiB", "MIB": "MiB", "GIB": "GiB", "TIB": "TiB", "B": "B"}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: object, where: str = "size") -> int:
    """Return `size` in bytes: an int, or a string such as `"40GiB"`, `"1.5 MiB"`, `"100KB"`.

    KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000. Case is ignored.

    Raises:
        PlanError: it is not a whole, non-negative number of bytes, or its unit is unknown or
            ambiguous; the message starts with `where`.
    """
    way_out = 'Give a whole number of bytes, or a string like "40GiB" or "512KiB".'
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise PlanError(f"{where} = {size} is negative. {way_out}")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise PlanError(f"{where} = {size!r} is not a size. {way_out}")
    number, unit = match[1], match[2].upper() or "B"
    if unit not in UNITS:
        known = "B, KiB, MiB, GiB, TiB (powers of 1024) and KB, MB, GB, TB (powers of 1000)"
        raise PlanError(f"{where} = {size!r}: unknown unit {match[2]!r}. Allowed are {known}.")
    return round(float(number) * UNITS[unit]) if "." in number else int(number) * UNITS[unit]


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` as text in the largest binary unit that it fills: `1.5 KiB`, `512 B`."""
    for unit in ("TIB", "GIB", "MIB", "KIB"):
        if abs(num_bytes) >= BINARY[unit]:
            return f"{num_bytes / BINARY[unit]:.1f} {SPELLING[unit]}"
    return f"{num_bytes} B"


def exact_bytes(num_bytes: int) -> int | str:
    """Return the shortest form that `parse_bytes` reads back exactly: `"40GiB"`, or a plain int."""
    for unit in ("TIB", "GIB", "MIB", "KIB"):
        if num_bytes and num_bytes % BINARY[unit] == 0:
            return f"{num_bytes // BINARY[unit]}{SPELLING[unit]}"
    return num_bytes
