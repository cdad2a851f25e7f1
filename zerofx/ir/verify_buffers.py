"""What a graph's communication buffers are and which values look into them: for verify only."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import schema_of
from zerofx.ir import ops
from zerofx.ir.graphs import is_alias


class Kind(Enum):
    """Where a buffer's content comes from."""

    GATHERED = "gathered"  # an all-gather: alive from launch to release
    RESIDENT = "resident"  # refreshed in place: stays between calls
    KEPT = "kept"  # gathered in forward, saved whole for backward
    SHARD = "shard"  # this rank's slice of a bucket
    PARAM = "parameter"  # a full parameter, before sharding
    STATE = "state"  # a module buffer or user input that forward updates afterwards
    PACKED = "packed"  # a gradient buffer, until its reduction has been waited for
    REDUCED = "reduced"  # what a reduction delivers
    LEAVING = "offloaded"  # a value whose memory is given back once its copy has ended
    HOSTED = "hosted"  # its copy on the host
    STORED = "stored"  # its copy on NVMe
    RELOADED = "reloaded"  # and back on the device
    STAGED = "shard read from NVMe"  # into host memory
    NEAR = "reloaded shard"  # of a bucket that lives off the device: its shard, there


FULL = (Kind.GATHERED, Kind.RESIDENT, Kind.KEPT)  # what holds a whole bucket's parameters
PARAMETERS = (*FULL, Kind.SHARD, Kind.STAGED, Kind.NEAR, Kind.PARAM)  # what holds parameters at all


@dataclass(eq=False)
class Buffer:
    """One stretch of memory during one call, and what has happened to it so far.

    made: the node that launches or creates it.
    landed: its transfer has been waited for (True where there is none).
    released: the release that gave it back; taken: the node that claimed its slot since.
    packed, zeroed, reduced: of a gradient buffer, what was packed where, whether the rest is
        zero, and the launch of its reduction.
    source: of a reduction's result, the gradient buffer; of a copy, what it copies.
    stored: the store_grad of a reduction's result.
    reloaded: of a value on the host, its reload.
    written: of a value on the host, the launch of its way on to NVMe.
    updated: of a shard, the update that has overwritten it.
    is_away: of a shard and of a reduction's result, that the bucket lives off the device.
    offloaded: of such a result, the launch of the copy that takes it there.
    sent: of a reloaded shard, the gathered buffers that are made of it.
    behind: of a copy that stays, an earlier refresh that was under way: this one brings nothing.
    """

    kind: Kind
    made: fx.Node
    bucket: int = -1
    slot: int = -1
    landed: bool = True
    released: fx.Node | None = None
    taken: fx.Node | None = None
    packed: dict[int, fx.Node] = field(default_factory=dict)
    zeroed: bool = False
    reduced: fx.Node | None = None
    source: Buffer | None = None
    stored: fx.Node | None = None
    reloaded: fx.Node | None = None
    written: fx.Node | None = None
    updated: fx.Node | None = None
    is_away: bool = False
    offloaded: fx.Node | None = None
    sent: list[Buffer] = field(default_factory=list)
    behind: Buffer | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a transfer writes to it or reads from it now."""
        if self.kind is Kind.PACKED:
            return self.reduced is not None and not self.landed
        return not self.landed or any(not b.landed for b in self.sent)

    def is_open_to(self, target: Any) -> bool:
        """Say whether a node of this kind may read it now."""
        if self.taken is not None or self.released is not None or self.updated is not None:
            return False
        if self.kind is Kind.PACKED:
            return target is ops.pack or target in ops.REDUCES
        if self.kind is Kind.HOSTED:  # forward returns it or writes it out, backward reloads it
            return self.landed and target in (ops.reload, ops.write_out, "output")
        if self.kind is Kind.STORED:  # forward returns it, backward reads it
            return self.landed and target in (ops.read_back, "output")
        if self.kind is Kind.REDUCED:
            return self.landed and target is self._next_of_reduced()
        if self.kind is Kind.SHARD and self.is_away:
            return target in _FROM_AFAR
        if self.kind is Kind.STAGED:
            return self.landed and target in ops.RELOADS
        return self.landed and (self.kind is not Kind.NEAR or target in _SENDS)

    def _next_of_reduced(self) -> Any:
        """Return the one op that may take a reduced slice as far as it has come."""
        is_home = not self.is_away or self.offloaded is not None
        return ops.store_grad if is_home else ops.offload_grad


# what may be given a shard off the device, and a copy of it there
_FROM_AFAR = {*ops.RELOADS, ops.read_shard, ops.refresh, ops.resident, ops.grad_buffer, ops.update}
_SENDS = frozenset({ops.all_gather, ops.release})

Roots = tuple[Buffer, ...]


class Aliases:
    """Which buffers each value of a graph may look into, through any chain of views."""

    def __init__(self) -> None:
        self._roots: dict[fx.Node, Roots] = {}

    def __getitem__(self, node: fx.Node) -> Roots:
        return self._roots.get(node, ())

    def set(self, node: fx.Node, *buffers: Buffer) -> None:
        self._roots[node] = buffers

    def follow(self, node: fx.Node) -> None:
        """Take over the buffers of the inputs that the node's result may alias."""
        found: Roots = ()
        for source in alias_inputs(node):
            found += tuple(b for b in self._roots.get(source, ()) if b not in found)
        if found:
            self._roots[node] = found


def alias_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs whose storage the node's result may share."""
    if node.target is operator.getitem:
        yield args(node)[0]
        return
    if not is_alias(node):
        return
    for position, name in _alias_arguments(node.target):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        yield from _nodes(given)


def _nodes(argument: Any) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for a in argument:
            yield from _nodes(a)


@functools.cache
def _alias_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    arguments = schema_of(target).arguments
    found = tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None)
    # views that hide it in their schema (_unsafe_view) look into their first argument
    return found or tuple((0, a.name) for a in arguments[:1])


_aten = torch.ops.aten


def unread(node: fx.Node) -> frozenset[int]:
    """Return the positions of arguments whose values the op does not read.

    A backward op takes them to know whether a gradient is wanted, and of what shape.
    """
    if node.target is _aten.native_layer_norm_backward.default:
        return frozenset({6})  # bias
    if node.target is _aten.convolution_backward.default:
        wants_input, wants_weight, _ = args(node)[10]
        return frozenset({1} if not wants_weight else ()) | ({2} if not wants_input else set())
    return frozenset()


def args(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments, typed as its op's schema says rather than as a union of all."""
    return node.args


def argument(node: fx.Node, position: int, default: Any = None) -> Any:
    """Return a positional argument of a zerofx op, its default where it was left out."""
    return node.args[position] if len(node.args) > position else default


_SLOT = {ops.all_gather: 3, ops.reload_shard: 3, ops.grad_buffer: 4, ops.release: 1}


def slot_of(node: fx.Node) -> Any:
    """Return the slot that a gather, reload, grad_buffer or release names, -1 for none."""
    return argument(node, _SLOT[node.target], -1)  # type: ignore[index]
