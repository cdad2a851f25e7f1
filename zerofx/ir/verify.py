"""Prove a program: order (happens-before) and dataflow."""

from __future__ import annotations

from zerofx.ir.program import Program


def verify(program: Program) -> None:
    for gm in program.graphs.values():
        gm.graph.lint()
