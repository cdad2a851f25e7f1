"""Segments of a forward: runs of one unit, within which activations may be recomputed.

Backward recomputes a value only from the kept values of its own segment and the values that enter
it. Segments of equal structure are identical node for node, so a decision for one applies to all of
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.analysis.recompute.activations import JointParts, is_param_alias
from zerofx.compat.graphs import pytree
from zerofx.ir.graphs import is_alias
from zerofx.ir.meta import Role, info, value


@dataclass(eq=False)
class Segment:
    """A run of forward nodes of one unit, in order.

    entering: its inputs from other segments, inputs and buffers, in the order of first use.
    leaving: its values that other segments read.
    needed: its values that backward reads; `needed_before`: the needed values that enter it,
        which are freed when this segment's backward has run.
    structure: equal for identical segments.
    """

    index: int
    unit: str
    nodes: list[fx.Node]
    entering: list[fx.Node]
    leaving: list[fx.Node]
    needed: list[fx.Node]
    needed_before: list[fx.Node]
    structure: Hashable = None


def find_segments(parts: JointParts) -> list[Segment]:
    """Return the segments of a joint graph's forward half."""
    segments = [Segment(i, u, ns, [], [], [], []) for i, (u, ns) in enumerate(_stretches(parts))]
    home = {n: s for s in segments for n in s.nodes}
    for segment in segments:
        own = set(segment.nodes)
        inputs = dict.fromkeys(a for n in segment.nodes for a in n.all_input_nodes if a not in own)
        segment.entering = [n for n in inputs if not _is_free(n)]
        segment.leaving = [
            n for n in segment.nodes if any(home.get(u, segment) is not segment for u in n.users)
        ]
    backward = set(parts.backward)
    for node in parts.frontier:
        if node in home and isinstance(value(node), torch.Tensor) and not is_param_alias(node):
            _charge(node, home, backward)
    for segment in segments:
        segment.structure = _structure(segment)
    return segments


def _stretches(parts: JointParts) -> Iterable[tuple[str, list[fx.Node]]]:
    """Yield (unit, nodes); views stay with their source."""
    stretches: list[tuple[str, list[fx.Node]]] = []
    at: dict[fx.Node, list[fx.Node]] = {}
    for node in parts.forward:
        source = node.all_input_nodes[0] if is_alias(node) and node.all_input_nodes else None
        if source in at and at[source] is stretches[-1][1]:
            pass
        elif not stretches or (info(node).unit != stretches[-1][0] and node.op != "get_attr"):
            stretches.append((info(node).unit, []))
        stretches[-1][1].append(node)
        at[node] = stretches[-1][1]
    return stretches


def _is_free(node: fx.Node) -> bool:
    """Return whether backward has a value at no cost: a gathered parameter or a constant."""
    return node.op == "get_attr" or is_param_alias(node)


def _charge(node: fx.Node, home: dict[fx.Node, Segment], backward: set[fx.Node]) -> None:
    """Assign a value that backward reads to the segment whose backward reads it last."""
    readers = {info(u).unit for u in node.users if u in backward}
    made = home[node]
    after = sorted(
        {home[u] for u in node.users if u in home and home[u] is not made}, key=lambda s: s.index
    )
    last = next((s for s in after if s.unit in readers), None)
    if made.unit in readers or last is None:
        made.needed.append(node)
    else:
        last.needed_before.append(node)


def _structure(segment: Segment) -> Hashable:
    """Return a key of the nodes, their arguments by position, forms, and the needed values."""
    place: dict[fx.Node, Any] = {n: i for i, n in enumerate(segment.nodes)}
    outside: dict[fx.Node, Any] = {}

    def named(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if argument in place:
            return place[argument]
        role = info(argument).role
        kind = role if role in (Role.PARAM, Role.INPUT, Role.BUFFER) else None
        return outside.setdefault(argument, ("outside", len(outside), kind, _form(argument)))

    rows = []
    for node in segment.nodes:
        args = pytree.tree_map(named, (node.args, node.kwargs))
        target = "constant" if node.op == "get_attr" else str(node.target)
        is_result = any(u.op == "output" for u in node.users)
        rows.append((target, repr(args), _form(node), info(node).is_random, is_result))
    marked = tuple(
        tuple(place.get(n, named(n)) for n in group)
        for group in (segment.leaving, segment.needed, segment.needed_before)
    )
    return repr((rows, marked))


def _form(node: fx.Node) -> str:
    leaves = pytree.tree_leaves(value(node))
    return repr([
        (tuple(v.shape), v.stride(), str(v.dtype)) if isinstance(v, torch.Tensor) else v
        for v in leaves
    ])  # fmt: skip
