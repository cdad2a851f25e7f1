"""Every graph is runnable as it stands: the ops' real bodies do what the emitted schedule does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor, fx
from training import loss_of

import zerofx
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.runtime.engine import Engine
from zerofx.runtime.graph_calls import GraphCalls

CASES_RUN = ["gpt", "convnet", "stage"]


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


def run_both(name: str, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return what three steps leave, by the emitted schedule and by the graphs."""
    results = []
    for by_graphs in (False, True):
        torch.manual_seed(0)
        model = zerofx.compile(CASES[name].make(), {"stage": stage, "kernels": "aten"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            args, kwargs = CASES[name].batch(step)
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if by_graphs and step == 0:
                interpret(model)
        results.append([loss.detach(), *model.state_dict().values()])
    return results[0], results[1]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize("name", CASES_RUN)
def test_graphs_run_as_the_schedule_does(pool: Any, name: str, stage: int) -> None:
    for emitted, by_graphs in pool.run(2, run_both, name, stage):
        assert len(emitted) == len(by_graphs)
        assert all(torch.equal(a, b) for a, b in zip(emitted, by_graphs, strict=True))
