"""Sets of ops that tests pick nodes by, each by what the specs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerofx import ops as ops
from zerofx.ir.spec import Kind, OpSpec, specs, target_of
from zerofx.runtime.tiers import Tier


def _all(test: Callable[[OpSpec], bool]) -> frozenset[Any]:
    return frozenset(target_of(spec) for spec in specs() if test(spec))


ALL = _all(lambda op: True)
TRANSFERS = _all(lambda op: op.kind is Kind.LAUNCH)
LAUNCHES = _all(lambda op: op.kind is Kind.LAUNCH and op.is_agreed)  # what the ranks agree on
GATHERS = _all(lambda op: op.is_gather)
REDUCES = _all(lambda op: op.is_reduction)
COPIES = _all(lambda op: op.is_copy)
SPILLS = _all(lambda op: op.is_copy and (Tier.NVME is op.lands or op.verb == "RD"))
MOVES = _all(lambda op: op.is_move)
RELOADS = _all(lambda op: op.is_reload)
