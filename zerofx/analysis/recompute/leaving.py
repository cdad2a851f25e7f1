"""Offload candidates: the storages that could be on the host between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.analysis.memory.storage import span_bytes
from zerofx.ir.graphs import alias_source, is_alias
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned


@dataclass(frozen=True)
class Leaving:
    """A storage that forward saves for backward, whole or as views.

    root: the forward node that creates it. views: its saved views, by position among the saved
        values.
    names, units: of the saved values. nbytes: the bytes that a copy moves.
    last: the forward region after which nothing reads it.
    first: the first backward region that reads it.
    """

    root: fx.Node
    views: dict[int, fx.Node]
    names: tuple[str, ...]
    units: tuple[str, ...]
    nbytes: int
    last: int
    first: int


def leaving(program: Planned) -> list[Leaving]:
    """Return the storages that may be offloaded, in the order of their last use in forward.

    Excluded are inputs, parameters and buffers, values that the user or the model receives, and
    values that backward reads outside its regions.
    """
    if FORWARD not in program.graphs or BACKWARD not in program.graphs:
        return []
    specs = list(zip(program.outputs[FORWARD], program.results(FORWARD), strict=True))
    stays = {alias_source(r) for s, r in specs if s.role is not Role.SAVED and _is_node(r)}
    saved = [(s, r) for s, r in specs if s.role is Role.SAVED]
    by_root: dict[fx.Node, dict[int, fx.Node]] = {}
    for position, (_, result) in enumerate(saved):
        by_root.setdefault(alias_source(result), {})[position] = result
    taken = {info(n).index: n for n in program.placeholders(BACKWARD, Role.SAVED)}
    found = []
    for root, views in by_root.items():
        if root in stays or not _may_leave(root) or not all(map(_is_plain, views.values())):
            continue
        reads = [_regions(list(taken[i].users)) for i in views]
        first = [r for rs in reads for r in rs or ()]
        last = _regions([root, *_users(root)])
        if last is None or not first or None in reads:
            continue
        found.append(
            Leaving(
                root=root,
                views=views,
                names=tuple(saved[i][0].name for i in views),
                units=tuple(info(v).unit for v in views.values()),
                nbytes=span_bytes(value(root)),
                last=max(last),
                first=min(first),
            )
        )
    return sorted(found, key=lambda held: held.last)


def chain(root: fx.Node, view: fx.Node) -> list[fx.Node]:
    """Return the views that lead from `root` to `view`, first to last."""
    nodes: list[fx.Node] = []
    while view is not root:
        nodes.append(view)
        view = next(a for a in view.args if isinstance(a, fx.Node))
    return nodes[::-1]


def _is_node(result: object) -> bool:
    return isinstance(result, fx.Node)


def _may_leave(root: fx.Node) -> bool:
    """Return whether forward created all of this storage, and a copy would move all of it."""
    made = value(root)
    if root.op != "call_function" or info(root).region is None:
        return False
    if not isinstance(made, torch.Tensor) or made.numel() == 0:
        return False
    is_copy = root.target is torch.ops.aten.clone.default
    if is_copy and root.all_input_nodes[0].op == "placeholder":
        return False  # a buffer or input that is updated after forward
    return span_bytes(made) == nbytes(made)


def _is_plain(view: fx.Node) -> bool:
    """Return whether each view on the way to the storage reads nothing else."""
    return all(len(n.all_input_nodes) == 1 for n in chain(alias_source(view), view))


def _users(root: fx.Node) -> list[fx.Node]:
    """Return the readers of a storage through any of its views, except the graph's result."""
    found: list[fx.Node] = []
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                continue
            found.append(user)
            if is_alias(user):
                stack.append(user)
    return found


def _regions(nodes: list[fx.Node]) -> list[int] | None:
    """Return the regions of some nodes, or None if one is in no region."""
    found = [info(n).region for n in nodes]
    return None if None in found else found  # type: ignore[return-value]
