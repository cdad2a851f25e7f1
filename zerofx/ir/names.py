"""Readable names of a graph's nodes: from the user's model where they stand for something there."""

from __future__ import annotations

from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.meta import Info, Role, info
from zerofx.ir.text import identifier

STEMS: dict[Any, str] = {
    ops.all_gather: "gather", ops.refresh: "refresh", ops.resident: "full", ops.wait: "full",
    ops.grad_buffer: "grads", ops.pack: "packed", ops.reduce_scatter: "reduce",
    ops.all_reduce: "reduce", ops.store_grad: "stored", ops.update: "update",
    ops.offload: "offload", ops.reload: "reload", ops.reload_shard: "reload",
    ops.refresh_shard: "refresh", ops.read_shard: "read", ops.offload_grad: "offload",
    ops.write_out: "write", ops.read_back: "read",
}  # fmt: skip


def name_nodes(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return one identifier a node, unique within the graph and the same in every run."""
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
    if node.target is ops.wait and node.all_input_nodes[0].target in ops.REDUCES:
        return f"reduced_{where.index}"
    if node.target is ops.wait and node.all_input_nodes[0].target in ops.COPIES:
        return copy_stem(node, where)
    if node.target is ops.wait and is_moved(node):
        return move_stem(node)
    if node.target in STEMS:
        return f"{STEMS[node.target]}_{where.index}"
    if node.target is ops.param_view:
        return identifier(where.name)
    return node.name


def copy_stem(wait: fx.Node, where: Info) -> str:
    """Name what a copy delivers: off the device by its number, back there by what it is."""
    target = wait.all_input_nodes[0].target
    if target is ops.write_out:
        return f"stored_{where.index}"
    if target in (ops.offload, ops.read_back):
        return f"host_{where.index}"
    return identifier(f"{where.unit}_{where.name}" if where.unit else where.name)


def is_moved(wait: fx.Node) -> bool:
    """Say whether a wait delivers a shard that was reloaded, or a gradient that was offloaded."""
    return wait.all_input_nodes[0].target in ops.MOVES


def move_stem(wait: fx.Node) -> str:
    """Name it: a gradient away from the device, a shard there, or a bucket where that is whole."""
    index = info(wait).index
    if wait.all_input_nodes[0].target is ops.offload_grad:
        return f"away_{index}"
    if wait.all_input_nodes[0].target is ops.read_shard:
        return f"staged_{index}"
    is_sent = any(u.target is ops.all_gather for u in wait.users)
    return f"shard_{index}" if is_sent else f"full_{index}"
