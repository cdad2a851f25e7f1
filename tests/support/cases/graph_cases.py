"""Compiled models that run their graphs in place of their emitted schedules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.runtime.engine import Engine
from zerofx.runtime.graph_calls import GraphCalls


def run_graph(program: Planned, name: str, engine: Engine, given: dict[Role, Any]) -> Any:
    """Run one graph of a program node by node; return its results by role."""
    values = []
    for node in program.graph(name).nodes:
        if node.op == "placeholder":
            role, at = info(node).role, info(node)
            values.append(given[role][at.name if role is Role.BUFFER else at.index])
    with GraphCalls(engine).active():
        results = fx.Interpreter(program.graphs[name]).run(*values)
    by_role: dict[Role, list[Tensor]] = {}
    for spec, value in zip(program.outputs[name], results, strict=True):
        by_role.setdefault(spec.role, []).append(value)
    return by_role


def interpret(model: Any) -> None:
    """Make a compiled model run its graphs in place of its emitted schedule."""
    program = model.programs[0]
    executable = next(iter(model._programs.bound.values())).executable

    def forward(engine: Engine, shards: Any, buffers: Any, inputs: Any) -> Any:
        given = {Role.SHARD: shards, Role.BUFFER: buffers, Role.INPUT: inputs}
        found = run_graph(program, FORWARD, engine, given)
        updates = found.get(Role.BUFFER_UPDATE, []) + found.get(Role.INPUT_UPDATE, [])
        return found.get(Role.OUTPUT, []), updates, found.get(Role.SAVED, [])

    def backward(engine: Engine, shards: Any, saved: Any, tangents: Any) -> Any:
        given = {Role.SHARD: shards, Role.SAVED: saved, Role.TANGENT: tangents}
        return run_graph(program, BACKWARD, engine, given).get(Role.INPUT_GRAD, [])

    executable.forward, executable.backward = forward, backward
