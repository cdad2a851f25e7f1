"""Node names: readable identifiers, taken from the user's model where possible."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from zerofx.ir.meta import Role, info
from zerofx.ir.spec import Kind, spec_of
from zerofx.ir.text import identifier


def name_nodes(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return one identifier per node, unique within the graph and the same in every run."""
    taken: set[str] = set()
    named: dict[fx.Node, str] = {}
    for node in graph.nodes:
        stem = _stem(node)
        name, k = stem, 1
        while name in taken:
            k += 1
            name = f"{stem}_{k}"
        taken.add(name)
        named[node] = name
    return named


def _stem(node: fx.Node) -> str:
    where = info(node)
    if node.op == "placeholder":
        if where.role is Role.TANGENT:
            return f"grad_{identifier(where.name)}" if where.name else node.name
        return identifier(where.name) if where.name else node.name
    return op_stem(node) or node.name


def op_stem(node: fx.Node) -> str:
    """Return the name of a zerofx op's result, or "" if it has no name of its own."""
    spec, where = spec_of(node), info(node)
    if spec is None:
        return ""
    if spec.kind is Kind.WAIT:
        assert spec.arrives_as is not None
        return spec.arrives_as(node)
    if spec.stem:
        return f"{spec.stem}_{where.index}"
    return identifier(where.name) if spec.kind is Kind.VIEW else ""


def find_unit_of_module(name: str, units: Collection[str]) -> str:
    """Return the unit that contains a module: itself or its nearest ancestor in `units`, or ""."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name
