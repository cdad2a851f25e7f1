"""Details of each step of a schedule: shapes, bytes, source line, and the step that reads it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.analysis.time.steps import Step, StepList
from zerofx.ir.dump import callee
from zerofx.ir.graphs import is_alias, is_glue
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, kind_of, spec_of
from zerofx.ir.text import describe
from zerofx.layout.buckets import Bucket

MOST = 12  # operators or parameters that are named


@dataclass(frozen=True)
class Detail:
    """Details of one step.

    moves: shapes that a transfer moves or a region returns: "f32[4288]". nbytes: their bytes.
    names: operators of a region with their results, or parameters of a transfer.
    used_by: the first step that reads the result of a launch, after its wait; "" if there is none.
    """

    step: Step
    moves: str = ""
    nbytes: int = 0
    line: str = ""
    names: tuple[str, ...] = ()
    used_by: str = ""


def details(program: Planned, schedule: StepList) -> dict[str, Detail]:
    """Return the detail of every step, by its name, in order."""
    nodes = schedule.memory.life.nodes
    buckets = {b.index: b for b in program.layout.buckets}
    own = {s.name: [n for _, n in nodes[s.times[0] : s.times[1]]] for s in schedule.steps}
    owner = {node: name for name, nodes in own.items() for node in nodes}
    return {s.name: _detail(s, own[s.name], owner, buckets) for s in schedule.steps}


def _detail(
    step: Step, nodes: list[fx.Node], owner: Mapping[fx.Node, str], buckets: Mapping[int, Bucket]
) -> Detail:
    if step.kind == "region":
        return _region(step, nodes)
    node = nodes[0]
    line = info(node).line
    if step.kind == "sync" and not step.is_value:
        return Detail(step, f"{len(node.all_input_nodes)} buffers", nbytes(value(node)), line)
    moved = node.all_input_nodes[0] if node.all_input_nodes else node
    if step.kind in ("launch", "wait") and isinstance(value(node), torch.Tensor):
        moved = node
    names: tuple[str, ...] = (str(moved.name),)
    if not step.is_value and step.bucket in buckets:
        names = tuple(f"{p.name}  {list(p.shape)}" for p in buckets[step.bucket].params)
    used = _first_reader(node, owner) if step.kind == "launch" else ""
    size = nbytes(value(moved))
    return Detail(step, describe(value(moved)), size, line, _some(names), used)


def _region(step: Step, nodes: list[fx.Node]) -> Detail:
    compute = [n for n in nodes if n.op == "call_function" and spec_of(n) is None]
    compute = [n for n in compute if not is_glue(n)]
    inside = set(compute)
    leaving = [n for n in compute if any(u not in inside for u in n.users) and not is_alias(n)]
    made = [value(n) for n in leaving if isinstance(value(n), torch.Tensor)]
    names = tuple(
        f"{_operator(n)}  {describe(value(n))}"
        for n in compute
        if not is_alias(n) and isinstance(value(n), torch.Tensor)
    )
    line = next((info(n).line for n in compute if info(n).line), "")
    shapes = ", ".join(dict.fromkeys(describe(v) for v in made))
    return Detail(step, shapes, sum(map(nbytes, made)), line, _some(names))


def _operator(node: fx.Node) -> str:
    """Name the operator that makes a value, also if it makes several."""
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return callee(made_by.target).removeprefix("aten.")


def _first_reader(launch: fx.Node, owner: Mapping[fx.Node, str]) -> str:
    """Return the first step that reads the result of a launch, through its wait and views."""
    todo, found = list(launch.users), ""
    while todo:
        node = todo.pop(0)
        if kind_of(node) in (Kind.WAIT, Kind.VIEW) or is_glue(node):
            todo += node.users
        elif node.op != "output" and kind_of(node) is not Kind.RELEASE:
            found = owner.get(node, "")
            if found:
                return found
    return found


def _some(names: tuple[str, ...]) -> tuple[str, ...]:
    more = len(names) - MOST
    return names if more <= 0 else (*names[:MOST], f"and {more} more")
