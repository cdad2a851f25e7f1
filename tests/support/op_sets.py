"""Sets of ops that tests pick nodes by, each by what the specs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerofx import ops as ops
from zerofx.ir.spec import Kind, OpSpec, specs, target_of


def _all(test: Callable[[OpSpec], bool]) -> frozenset[Any]:
    return frozenset(target_of(spec) for spec in specs() if test(spec))


_SETS: dict[str, Callable[[OpSpec], bool]] = {
    "ALL": lambda op: True,
    "TRANSFERS": lambda op: op.kind is Kind.LAUNCH,
    "LAUNCHES": lambda op: op.kind is Kind.LAUNCH and op.is_agreed,  # what the ranks agree on
    "GATHERS": lambda op: op.is_gather,
    "REDUCES": lambda op: op.is_reduction,
    "COPIES": lambda op: op.is_copy,
    "MOVES": lambda op: op.is_move,
    "RELOADS": lambda op: op.is_reload,
}


def __getattr__(name: str) -> frozenset[Any]:
    """Return a set as it is now: a test may have declared more ops."""
    if name not in _SETS:
        raise AttributeError(name)
    return _all(_SETS[name])
