"""Write a program as text: one node a line, fixed columns, stable across runs."""

from __future__ import annotations

from zerofx.ir.program import Program


def dump_program(program: Program, title: str = "") -> str:
    parts = [f"# {title}"]
    for name, gm in program.graphs.items():
        parts.append(f"# {name}\n" + str(gm.graph))
    return "\n".join(parts)
