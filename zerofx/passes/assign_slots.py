"""assign-slots: give every gathered bucket and gradient buffer a fixed place in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.colouring import assign


@dataclass(frozen=True)
class AssignSlots(Pass):
    """Assign the buffers of collectives to as few memory slots as their live ranges allow."""

    name: ClassVar[str] = "assign-slots"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    def run(self, program: Planned) -> Report:
        sizes = assign(program)
        program.slot_bytes = tuple(sizes)
        return Report(bool(sizes), f"{len(sizes)} slots, {sum(sizes)} bytes")
