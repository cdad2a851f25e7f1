"""When each storage of a graph comes to life and dies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info, nbytes, value


@dataclass(frozen=True)
class Range:
    """One storage: made at step `birth`, last read at step `death` (node positions)."""

    node: fx.Node
    nbytes: int
    birth: int
    death: int
    category: str


def live_ranges(graph: fx.Graph) -> list[Range]:
    """Return the live range of every storage; views count at their source, once."""
    nodes = list(graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    death: dict[fx.Node, int] = {}
    for node in nodes:
        for read in node.all_input_nodes:
            source = alias_source(read)
            death[source] = max(death.get(source, 0), position[node])
    found = []
    for node in nodes:
        if node.op == "output" or alias_source(node) is not node:
            continue
        for tensor in _tensors(node):
            size = nbytes(tensor)
            if size:
                end = death.get(node, position[node])
                found.append(Range(node, size, position[node], end, category(node)))
    return found


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    val = value(node)
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (tuple, list)) and node.target not in ops.ALL:
        yield from (v for v in val if isinstance(v, torch.Tensor))


def category(node: fx.Node) -> str:
    """Name what a storage is for: parameters, gathered, gradients, saved, inputs, temporaries."""
    role = info(node).role
    if role is Role.SHARD or role is Role.PARAM:
        return "parameters"
    if role is Role.BUFFER:
        return "buffers"
    if role is Role.SAVED:
        return "activations"
    if role in (Role.INPUT, Role.TANGENT):
        return "inputs"
    if node.target in ops.GATHERS or node.target is ops.resident:
        return "gathered"
    if node.target is ops.grad_buffer or node.target in ops.REDUCES:
        return "gradients"
    if any(u.op == "output" for u in node.users):
        return "activations"
    return "temporaries"
