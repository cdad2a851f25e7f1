"""Colour communication buffers with slots; shared by the passes that ask what slots cost."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graphs import is_in_place, users_after_views
from zerofx.ir.meta import nbytes, value
from zerofx.ir.program import Program
from zerofx.runtime.layout import Layout


def assign(program: Program) -> list[int]:
    """Write a slot into every gather and gradient buffer that fits one; return the slots' bytes.

    A slot holds one buffer at a time and only within one call: what leaves its call (a kept
    bucket) gets memory of its own, and what is reduced in place lies in p.grad's. Slots of all
    graphs share one pool, since calls never overlap.
    """
    sizes: list[int] = []
    for gm in program.graphs.values():
        _colour(gm.graph, sizes, program.layout)
    return sizes


def _colour(graph: fx.Graph, sizes: list[int], layout: Layout | None) -> None:
    free = set(range(len(sizes)))
    ends: dict[fx.Node, list[int]] = {}
    for node in list(graph.nodes):
        for slot in ends.pop(node, []):
            free.add(slot)
        if node.target is ops.all_gather or node.target is ops.grad_buffer:
            end = _end(node)
            if end is None or is_in_place(node, layout):
                continue
            slot = _take(free, sizes, nbytes(value(node)))
            node.args = (*node.args[:-1], slot) if _has_slot(node) else (*node.args, slot)
            if end.target is ops.release:
                end.args = (end.args[0], slot)
            ends.setdefault(end, []).append(slot)


def _has_slot(node: fx.Node) -> bool:
    return len(node.args) == (4 if node.target is ops.all_gather else 5)


def _end(node: fx.Node) -> fx.Node | None:
    """Return the node behind which the buffer is free, None where it leaves the call."""
    if node.target is ops.all_gather:
        wait = next(u for u in node.users if u.target is ops.wait)
        return next((u for u in wait.users if u.target is ops.release), None)
    launch = next(u for u in users_after_views(node) if u.target in ops.REDUCES)
    return next(u for u in launch.users if u.target is ops.wait)


def _take(free: set[int], sizes: list[int], wanted: int) -> int:
    """Take the smallest free slot that fits, else grow the largest free one, else add one."""
    fitting = [s for s in free if sizes[s] >= wanted]
    if fitting:
        slot = min(fitting, key=lambda s: (sizes[s], s))
    elif free:
        slot = max(free, key=lambda s: (sizes[s], -s))
        sizes[slot] = wanted
    else:
        slot = len(sizes)
        sizes.append(wanted)
    free.discard(slot)
    return slot
