"""What a Program can say of itself: gives its methods dump, schedule, memory and emit their bodies.

They are written in rooms above ir (views, codegen), which ir may not import; so Program names them,
and importing this room, as the face and the api do, hands them in.
"""

from __future__ import annotations

from zerofx.codegen.emit import emit
from zerofx.ir.dump import dump_program
from zerofx.ir.program import Program, register_reports
from zerofx.views import memory, schedule


def _dump(program: Program, level: str = "nodes") -> str:
    return dump_program(program, level=level)


register_reports(dump=_dump, schedule=schedule.view, memory=memory.view, emit=emit)
