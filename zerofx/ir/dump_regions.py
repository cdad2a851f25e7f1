"""A graph in fewer lines: one a region, or one a unit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.ir.dump_nodes import callee
from zerofx.ir.graphs import alias_source, is_alias, is_glue
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.names import name_nodes
from zerofx.ir.program import Program
from zerofx.ir.repeats import Layers, Row, collapse, spans
from zerofx.ir.spec import Kind, kind_of, launch_of, spec_of
from zerofx.ir.text import describe, without_numbers
from zerofx.plan.sizes import format_bytes


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
        for group in _groups(program, graph)
    ]
    return [f"def {graph}:", *collapse(rows)]


def unit_lines(program: Program, graph: str) -> list[str]:
    """Return one line a unit, in the order in which they compute; `made` outlives its regions."""
    by_unit: dict[str, list[Group]] = {}
    sent: dict[str, list[str]] = {}
    for group in _groups(program, graph):
        if group.region is not None:
            by_unit.setdefault(group.label, []).append(group)
        elif kind_of(group.nodes[0]) is Kind.LAUNCH:
            sent.setdefault(group.label, []).append(callee(group.nodes[0].target)[4:])
    rows = []
    for unit in dict.fromkeys([*by_unit, *sent]):
        groups, kinds = by_unit.get(unit, []), sent.get(unit, [])
        made = format_bytes(sum(g.made_bytes() for g in groups))
        num = sum(len(g.nodes) for g in groups)
        notes = f"{num:5d} nodes   {len(groups)} regions   made {made:<12}"
        notes += "".join(f"{kinds.count(k)} {k}   " for k in dict.fromkeys(kinds))
        line = f"    {unit or '(root)':<28}{notes}".rstrip()
        row = Row(unit, (without_numbers(unit), notes), lambda _, line=line: line)  # type: ignore[misc]
        rows.append(row)
    return [f"def {graph}:", *collapse(rows)]


def _groups(program: Program, graph: str) -> list[Group]:
    found: list[Group] = []
    for node in program.graph(graph).nodes:
        if node.op in ("placeholder", "output", "get_attr") or is_glue(node):
            continue
        where = info(node)
        if (spec := spec_of(node)) is not None:
            if not spec.is_quiet:
                found.append(Group(where.unit, None, [node]))
            continue
        region = -1 if where.region is None else where.region
        if not found or found[-1].region != region:
            found.append(Group("", region))
        found[-1].nodes.append(node)
        found[-1].label = found[-1].label or where.unit
    return found


def _region_row(group: Group) -> Row:
    ops_shown = [callee(n.target).removeprefix("aten.") for n in group.nodes if not is_alias(n)]
    heaviest = next((o for o in ops_shown if "mm" in o or "conv" in o or "attention" in o), "")
    made = f"+{format_bytes(group.made_bytes())}"
    key: Hashable = (without_numbers(group.label), tuple(ops_shown), made)

    def write(layers: Layers) -> str:
        number = "region" if group.region == -1 else f"region {spans(layers)[0]}"
        notes = f"{len(group.nodes):4d} nodes  {made:<12} {heaviest}"
        return f"    {number:<18} {group.label or '(root)':<32} {notes}".rstrip()

    return Row(group.label, key, write, (group.region,))


def _communication_row(group: Group, names: dict[fx.Node, str]) -> Row:
    (node,) = group.nodes
    name = callee(node.target).removeprefix("zfx.")
    kind = describe(value(node)) if isinstance(value(node), torch.Tensor) else ""
    key = (node.target, without_numbers(group.label), kind)

    kind_of_op = kind_of(node)
    spec = spec_of(launch_of(node) if kind_of_op is Kind.WAIT else node)
    of = "v" if spec is not None and spec.is_copy else "b"

    def write(layers: Layers) -> str:
        what = f"{name} {of}{spans(layers)[0]}" if kind_of_op is not Kind.SYNC else name
        return f"    {what:<18} {group.label:<32} {kind}".rstrip()

    return Row(group.label, key, write, (info(node).index,), is_main=False)
