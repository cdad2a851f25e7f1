"""Order: what each node of a graph may read at the place where it stands, and every slot's turns.

A graph is walked once, in the order in which its calls are made. A transfer occupies its memory
from its launch to its wait, a gathered buffer its slot from its launch to its release: this is
happens-before over the lanes, since a lane starts a transfer after the compute launched before it
and compute continues behind a wait only once it has landed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Fact
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import FORWARD, Program
from zerofx.ir.verify_buffers import FULL, Aliases, Buffer, Kind, args, argument, unread
from zerofx.ir.verify_fault import fault, name_of
from zerofx.runtime.layout import Bucket

_PARAMETERS = (*FULL, Kind.SHARD, Kind.PARAM)


@dataclass
class Crossing:
    """What a forward graph leaves for its backward.

    kept: gathered buckets, by position. hosted: positions of what waits on the host.
    """

    kept: dict[int, int] = field(default_factory=dict)
    hosted: set[int] = field(default_factory=set)
    refreshed: set[int] = field(default_factory=set)


class Walk:
    """Walks one graph and raises at the first node that breaks an invariant.

    What each zerofx op does to the buffers is a method of a subclass, looked up in `handlers()`.
    """

    def __init__(self, program: Program, graph: str, crossing: Crossing) -> None:
        self.program, self.name, self.crossing = program, graph, crossing
        self.layout = program.layout
        self.roots = Aliases()
        self.buffers: list[Buffer] = []
        self.slots: dict[int, Buffer] = {}
        self._known: set[fx.Node] = set()
        self._updated = {
            (Role.BUFFER if s.role is Role.BUFFER_UPDATE else Role.INPUT, s.name)
            for s in program.outputs.get(FORWARD, ())
            if s.role in (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
        }

    def fail(self, node: fx.Node, message: str) -> NoReturn:
        raise fault(self.program, self.name, node, message)

    def check(self) -> None:
        handlers = self.handlers()
        for node in self.program.graph(self.name).nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            else:
                self._reads(node)
                if node.op == "output":
                    self._results(node)
                elif node.target in ops.ALL:
                    handlers.get(node.target, self._misplaced)(node)
                else:
                    self.roots.follow(node)
            self._known.add(node)
        self.finish()

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        """Return what to do at each zerofx op."""
        return {}

    def _misplaced(self, node: fx.Node) -> None:
        self.fail(node, f"{node.name} is a gradient op: those belong into backward only")

    def finish(self) -> None:
        """Check what must have happened by the end of the graph."""
        for buffer in self.buffers:
            if buffer.kind in (Kind.GATHERED, Kind.RESIDENT) and not buffer.landed:
                self.fail(buffer.made, f"{self.label(buffer)} is launched but never waited for")

    # -- what a node reads ------------------------------------------------------------------------
    def _reads(self, node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read not in self._known:
                self.fail(node, f"{node.name} reads {name_of(read)} before it is computed")
            for buffer in self.roots[read]:
                is_open = buffer.is_open_to(node.target) and read.target not in _UNDER_WAY
                if not is_open and not is_unread(node, read):
                    self._read(node, read, buffer)

    def _read(self, node: fx.Node, read: fx.Node, buffer: Buffer) -> None:
        if node.target is ops.wait and read is buffer.made:
            return
        what = self.content(read, buffer)
        reader = _reader(node)
        if read.target in _UNDER_WAY:
            self.fail(
                node,
                f"{reader} reads {what} before its wait: only what `wait` returns may be read",
            )
        if not buffer.landed and buffer.kind is not Kind.PACKED:
            self.fail(node, f"{reader} reads {what} before its wait; move the wait before it")
        if buffer.released is not None and node.target is not ops.release:
            self.fail(
                node,
                f"{reader} reads {what} after its release; move the release behind the last "
                "read, or gather the bucket again",
            )
        if buffer.updated is not None:
            self.fail(
                node,
                f"{reader} reads {what} after {buffer.updated.name} has put the optimizer's new "
                "values there; move the update behind the last read",
            )
        if buffer.taken is not None:
            self.fail(
                node,
                f"{reader} uses {what} in slot {buffer.slot} behind {buffer.taken.name}, which "
                "puts another buffer there; give one of the two another slot, or move them apart",
            )
        if buffer.kind in _MEANT:
            self.fail(node, f"{reader} reads {what}: {_MEANT[buffer.kind]}")

    def content(self, read: fx.Node, buffer: Buffer) -> str:
        """Name what a read value holds: the parameter where it is a view of one."""
        if buffer.kind in _PARAMETERS:
            view = read
            while view.op == "call_function" and view.target is not ops.param_view:
                if view.target in ops.ALL or not view.all_input_nodes:
                    break
                view = view.all_input_nodes[0]
            if view.target is ops.param_view:
                return f"{name_of(view)}, a parameter of {self.label(buffer)},"
        return self.label(buffer)

    def label(self, buffer: Buffer) -> str:
        if buffer.bucket < 0:
            return f"{buffer.kind.value} {name_of(buffer.made)}"
        return f"{buffer.kind.value} bucket {buffer.bucket} ({self._bucket_label(buffer.bucket)})"

    def _bucket_label(self, index: int) -> str:
        assert self.layout is not None
        return self.layout.buckets[index].label()

    # -- where buffers come from ------------------------------------------------------------------
    def add(self, node: fx.Node, buffer: Buffer) -> None:
        self.buffers.append(buffer)
        self.roots.set(node, buffer)

    def claim(self, node: fx.Node, buffer: Buffer) -> None:
        """Give a buffer the slot that it names, and note whose content is gone with that."""
        if buffer.slot == -1:
            return
        sizes = self.program.slots.get("bytes", [])
        slot, wanted = buffer.slot, nbytes(value(node))
        if not 0 <= slot < len(sizes):
            self.fail(node, f"{node.name} names slot {slot}; the program has {len(sizes)}")
        if wanted > sizes[slot]:
            self.fail(node, f"{node.name} needs {wanted} bytes; slot {slot} holds {sizes[slot]}")
        holder = self.slots.get(slot)
        if holder is not None and holder.released is None:
            if holder.in_flight:
                self.fail(
                    node,
                    f"slots overlap: {node.name} puts {self.label(buffer)} into slot {slot} while "
                    f"{self.label(holder)} is in flight there; use another slot, or wait first",
                )
            holder.taken = node  # wrong only if something still uses what it held
        elif holder is not None:
            holder.taken = node
        self.slots[slot] = buffer

    def bucket(self, node: fx.Node, position: int = 1) -> Bucket:
        """Return the bucket that a communication node names."""
        index = argument(node, position)
        assert self.layout is not None, f"{node.name} without a layout"
        if type(index) is not int or not 0 <= index < len(self.layout.buckets):
            num = len(self.layout.buckets)
            self.fail(node, f"{node.name} names bucket {index!r}; the layout has {num}")
        return self.layout.buckets[index]

    def numel(self, node: fx.Node, wanted: int, of: str) -> None:
        given = argument(node, 2)
        if given != wanted or value(node).numel() != wanted:
            self.fail(node, f"{node.name} has {given} elements; {of} has {wanted}")

    def dtype(self, node: fx.Node, wanted: torch.dtype, of: str) -> None:
        if value(node).dtype is not wanted:
            self.fail(node, f"{node.name} is {value(node).dtype}; {of} is {wanted}")

    def _placeholder(self, node: fx.Node) -> None:
        where = info(node)
        if where.role is Role.SHARD:
            self._shard(node, where.index)
        elif where.role is Role.SAVED and where.index in self.crossing.kept:
            self.add(node, Buffer(Kind.KEPT, node, self.crossing.kept[where.index]))
        elif where.role is Role.PARAM:
            if Fact.PARAMS_SHARDED in self.program.facts:
                self.fail(node, f"{where.name} is read whole, but parameters are sharded")
            self.add(node, Buffer(Kind.PARAM, node))
        elif (where.role, where.name) in self._updated:
            self.add(node, Buffer(Kind.STATE, node))

    def _shard(self, node: fx.Node, index: int) -> None:
        assert self.layout is not None, f"{node.name} without a layout"
        if not 0 <= index < len(self.layout.buckets):
            num = len(self.layout.buckets)
            self.fail(node, f"{node.name} is a shard of bucket {index}; the layout has {num}")
        bucket = self.layout.buckets[index]
        wanted, given = self.layout.shard_numel(bucket), value(node).numel()
        if given != wanted or value(node).dtype != bucket.dtype:
            self.fail(
                node,
                f"{node.name} holds {given} elements of {value(node).dtype}; the shard of bucket "
                f"{index} has {wanted} of {bucket.dtype}",
            )
        self.add(node, Buffer(Kind.SHARD, node, index))

    # -- what leaves the graph --------------------------------------------------------------------
    def _results(self, output: fx.Node) -> None:
        specs = self.program.outputs[self.name]
        position = 0
        for spec, result in zip(specs, args(output)[0], strict=True):
            if isinstance(result, fx.Node):
                if spec.role is Role.SAVED:
                    self._saved(result, position)
                elif spec.role in (Role.OUTPUT, Role.INPUT_GRAD):
                    self._handed_out(result, f"{spec.role.value} {spec.name}")
            position += spec.role is Role.SAVED

    def _handed_out(self, result: fx.Node, what: str) -> None:
        for buffer in self.roots[result]:
            if buffer.kind in _PARAMETERS:
                held = self.content(result, buffer)
                self.fail(result, f"{what} looks into {held}, which changes later; clone it")

    def _saved(self, result: fx.Node, position: int) -> None:
        for buffer in self.roots[result]:
            what = self.content(result, buffer)
            if buffer.kind is Kind.GATHERED and result.target is ops.wait and buffer.slot == -1:
                self.crossing.kept[position] = buffer.bucket
            elif buffer.kind is Kind.GATHERED and buffer.slot >= 0:
                self.fail(
                    result,
                    f"saves {what} for backward, but it lies in slot {buffer.slot}, which the next "
                    "call overwrites; gather with slot=-1, or again in backward",
                )
            elif buffer.kind in _PARAMETERS:
                self.fail(
                    result,
                    f"saves {name_of(result)} for backward, a view of {what}; gather the "
                    "parameter again in backward",
                )
            elif buffer.kind is Kind.STATE:
                self.fail(
                    result,
                    f"saves {name_of(buffer.made)} for backward, which is updated after forward; "
                    "save a clone",
                )


def _reader(node: fx.Node) -> str:
    if node.target is ops.param_view:
        return f"the view of {name_of(node)}"
    return name_of(node) if node.op == "output" else node.name


_UNDER_WAY = ops.LAUNCHES | ops.COPIES
_MEANT = {
    Kind.PACKED: "a gradient buffer is for pack and reduce only",
    Kind.REDUCED: "a reduced slice is for store_grad only",
    Kind.HOSTED: "a value on the host is for reload only",
}


def is_unread(node: fx.Node, read: fx.Node) -> bool:
    """Say whether a node takes a value only in places where it does not look at it."""
    skipped = unread(node)
    if not skipped:
        return False
    read_by = [a for i, a in enumerate(args(node)) if i not in skipped]
    return not any(a is read or (isinstance(a, (list, tuple)) and read in a) for a in read_by)
