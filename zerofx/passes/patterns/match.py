"""A match of the pass `fuse`, and its insertion into a graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.compat.graphs import op_name
from zerofx.ir.graphs import call
from zerofx.ir.meta import info, set_info, value

aten = torch.ops.aten


@dataclass(frozen=True)
class Out:
    """A placeholder, in the arguments of a match's later call, for a result of an earlier one."""

    call: int
    index: int


@dataclass(frozen=True)
class FusedCall:
    """A fused node to create: its op, its arguments, and the nodes that its results replace.

    results: index in the op's tuple (0 if it returns one tensor) -> the node replaced.
    like: the node whose unit, module and line the new nodes take.
    """

    target: Any
    args: tuple[Any, ...]
    results: dict[int, fx.Node]
    like: fx.Node


@dataclass(frozen=True)
class Match:
    """A pattern that was found: its calls in graph order, and all nodes that are removed."""

    calls: tuple[FusedCall, ...]
    inside: frozenset[fx.Node]

    def is_closed(self) -> bool:
        """Return whether only the replaced results are read from outside the match."""
        replaced = {n for c in self.calls for n in c.results.values()}
        return all(u in self.inside for n in self.inside - replaced for u in n.users)


@dataclass
class Fusion:
    """The insertion of matches into a graph, one after another.

    made: replaced node -> its current replacement: later matches may have it as an argument.
    """

    graph: fx.Graph
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    gone: set[fx.Node] = field(default_factory=set)

    def put(self, match: Match) -> bool:
        """Replace a match by its fused nodes, or leave the graph unchanged and return False.

        A match cannot be inserted if an outside node reads an inner value, if no position is after
        all arguments and before all readers, or if a result would have a different memory layout.
        """
        if match.inside & self.gone or not match.is_closed():
            return False
        new: list[fx.Node] = []
        pairs = self._calls(match, new)
        if pairs is None or any(_form(old) != _form(found) for old, found in pairs.items()):
            _erase(reversed(new))
            return False
        for old, found in pairs.items():
            old.replace_all_uses_with(found, delete_user_cb=lambda user: user not in new)
        _erase(sorted(match.inside, reverse=True))
        _erase(n for n in reversed(new) if _is_item(n) and not n.users)
        self.gone |= match.inside
        self.made |= pairs
        return True

    def _calls(self, match: Match, new: list[fx.Node]) -> dict[fx.Node, fx.Node] | None:
        """Create the fused nodes; return the replacement of each replaced node."""
        pairs: dict[fx.Node, fx.Node] = {}
        outs: list[dict[int, fx.Node]] = []
        for fused in match.calls:
            args = tuple(self._argument(a, outs) for a in fused.args)
            point = _place(fused, args, match.inside)
            if point is None:
                return None
            with self.graph.inserting_after(point):
                node = _named(call(self.graph, fused.target, args, like=fused.like))
            new.append(node)
            outs.append(_items(self.graph, node, new))
            for at, old in fused.results.items():
                pairs[old] = _with_dtype(self.graph, old, outs[-1][at], new)
        return pairs

    def _argument(self, argument: Any, outs: list[dict[int, fx.Node]]) -> Any:
        if isinstance(argument, Out):
            return outs[argument.call][argument.index]
        while isinstance(argument, fx.Node) and argument in self.made:
            argument = self.made[argument]
        return argument


def _named(node: fx.Node) -> fx.Node:
    """Name a call as a captured one is named: after its op, without the overload."""
    with node.graph.inserting_after(node):
        base = op_name(node.target)[1]  # type: ignore[arg-type]
        named = node.graph.create_node("call_function", node.target, node.args, name=base)
    named.meta = node.meta
    node.graph.erase_node(node)
    return named


def _items(graph: fx.Graph, node: fx.Node, made: list[fx.Node]) -> dict[int, fx.Node]:
    """Return a call's results by index; several results are unpacked by getitems after the call."""
    if isinstance(value(node), Tensor):
        return {0: node}
    found: dict[int, fx.Node] = {}
    last = node
    for index in range(len(value(node))):
        with graph.inserting_after(last):
            last = call(graph, operator.getitem, (node, index), like=node)
        found[index] = last
        made.append(last)
    return found


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _place(fused: FusedCall, args: tuple[Any, ...], inside: Collection[fx.Node]) -> fx.Node | None:
    """Return the node to insert after: just before the replaced node, or the last argument."""
    at = max(min(fused.results.values()).prev, *(a for a in args if isinstance(a, fx.Node)))
    while at.next.op == "placeholder" or _is_item(at.next):
        at = at.next  # getitems stay after the call that they unpack
    readers = [u for n in fused.results.values() for u in n.users if u not in inside]
    return at if all(at < user for user in readers) else None


def _with_dtype(graph: fx.Graph, old: fx.Node, new: fx.Node, made: list[fx.Node]) -> fx.Node:
    """Return `new`, cast if its dtype differs from the dtype of the node it replaces."""
    before, after = value(old), value(new)
    if before.dtype == after.dtype:
        return new
    with graph.inserting_after(_last_item(new)):
        cast = graph.call_function(aten._to_copy.default, (new,), {"dtype": before.dtype})
    cast.meta["val"] = after.to(before.dtype)
    where = info(new)
    set_info(cast, phase=where.phase, unit=where.unit, module=where.module, line=where.line)
    made.append(cast)
    return cast


def _last_item(node: fx.Node) -> fx.Node:
    while _is_item(node.next):
        node = node.next
    return node


def _form(node: fx.Node) -> tuple[Any, ...]:
    val = value(node)
    return tuple(val.shape), val.dtype, tuple(val.stride())


def _erase(nodes: Iterable[fx.Node]) -> None:
    """Erase nodes, given from the last to the first."""
    for node in nodes:
        node.graph.erase_node(node)
