"""A graph in fewer lines: one a region, or one a unit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.dump_nodes import callee
from zerofx.ir.graphs import alias_source, is_alias, is_glue
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.names import name_nodes
from zerofx.ir.program import Program
from zerofx.ir.repeats import Row, collapse
from zerofx.ir.text import describe, without_numbers
from zerofx.sizes import format_bytes

_QUIET = (ops.param_view, ops.grad_buffer, ops.store_grad)  # shown at level "nodes" only


@dataclass
class Group:
    """Neighbouring nodes that one line stands for."""

    label: str
    region: int | None
    nodes: list[fx.Node] = field(default_factory=list)

    def made_bytes(self) -> int:
        """Return the bytes of new storages that outlive the group, views counted at their own."""
        inside = set(self.nodes)
        leaving = (n for n in self.nodes if any(u not in inside for u in n.users))
        sources = dict.fromkeys(alias_source(n) for n in leaving)
        tensors = (value(n) for n in sources if n in inside)
        return sum(nbytes(v) for v in tensors if isinstance(v, torch.Tensor))


def region_lines(program: Program, graph: str) -> list[str]:
    """Return one line a region and one a launch, wait or release."""
    names = name_nodes(program.graph(graph))
    rows = [
        _region_row(group) if group.region is not None else _communication_row(group, names)
        for group in _groups(program, graph, by_unit=False)
    ]
    return [f"def {graph}:", *collapse(rows)]


def unit_lines(program: Program, graph: str) -> list[str]:
    """Return one line a stretch of nodes of one unit."""
    rows = []
    for group in _groups(program, graph, by_unit=True):
        compute = [n for n in group.nodes if info(n).region is not None or n.target not in ops.ALL]
        kinds = [callee(n.target) for n in group.nodes if n.target in ops.LAUNCHES]
        notes = [f"{len(compute)} nodes", f"+{format_bytes(group.made_bytes())}"]
        notes += [f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds)]
        line = f"    {group.label or '(root)':<32} {'   '.join(notes)}"
        key = (without_numbers(group.label), tuple(notes))
        rows.append(Row(group.label, key, lambda _, line=line: line))  # type: ignore[misc]
    return [f"def {graph}:", *collapse(rows)]


def _groups(program: Program, graph: str, by_unit: bool) -> list[Group]:
    found: list[Group] = []
    for node in program.graph(graph).nodes:
        if node.op in ("placeholder", "output", "get_attr") or is_glue(node):
            continue
        where = info(node)
        if by_unit:
            if not found or found[-1].label != where.unit:
                found.append(Group(where.unit, where.region))
        elif where.region is None and node.target in ops.ALL:
            if node.target in _QUIET:
                continue
            found.append(Group(where.unit, None))
        elif not found or found[-1].region is None or found[-1].region != where.region:
            found.append(Group(where.unit, -1 if where.region is None else where.region))
        found[-1].nodes.append(node)
    return found


def _region_row(group: Group) -> Row:
    ops_shown = [callee(n.target).removeprefix("aten.") for n in group.nodes if not is_alias(n)]
    heaviest = next((o for o in ops_shown if "mm" in o or "conv" in o or "attention" in o), "")
    made = f"+{format_bytes(group.made_bytes())}"
    key: Hashable = (without_numbers(group.label), tuple(ops_shown), made)

    def write(volatile: tuple[str, ...]) -> str:
        number = "region" if volatile[0] == "-1" else f"region {volatile[0]}"
        notes = f"{len(group.nodes):4d} nodes  {made:<12} {heaviest}"
        return f"    {number:<18} {group.label or '(root)':<32} {notes}".rstrip()

    return Row(group.label, key, write, (group.region,))


def _communication_row(group: Group, names: dict[fx.Node, str]) -> Row:
    (node,) = group.nodes
    name = callee(node.target).removeprefix("zfx.")
    kind = describe(value(node)) if isinstance(value(node), torch.Tensor) else ""
    key = (node.target, without_numbers(group.label), kind)

    def write(volatile: tuple[str, ...]) -> str:
        what = f"{name} b{volatile[0]}" if node.target is not ops.sync_buffers else name
        return f"    {what:<18} {group.label:<32} {kind}".rstrip()

    return Row(group.label, key, write, (info(node).index,))
