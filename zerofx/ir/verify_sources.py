"""Where a graph's buffers come from, which slots they claim, and how messages name them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Fact
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import FORWARD, Program
from zerofx.ir.verify_buffers import PARAMETERS, Aliases, Buffer, Kind, argument
from zerofx.ir.verify_fault import fault, name_of
from zerofx.runtime.layout import Bucket


@dataclass
class Crossing:
    """What a forward graph leaves for its backward.

    kept: gathered buckets, by position. away: what waits off the device, and where, by position.
    """

    kept: dict[int, int] = field(default_factory=dict)
    away: dict[int, Kind] = field(default_factory=dict)
    refreshed: set[int] = field(default_factory=set)


class Sources:
    """One graph and the buffers that it has had so far, by value and by slot."""

    def __init__(self, program: Program, graph: str, crossing: Crossing) -> None:
        self.program, self.name, self.crossing = program, graph, crossing
        self.layout = program.layout
        self.roots = Aliases()
        self.buffers: list[Buffer] = []
        self.slots: dict[int, Buffer] = {}
        self._updated = {
            (Role.BUFFER if s.role is Role.BUFFER_UPDATE else Role.INPUT, s.name)
            for s in program.outputs.get(FORWARD, ())
            if s.role in (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
        }

    def fail(self, node: fx.Node, message: str) -> NoReturn:
        raise fault(self.program, self.name, node, message)

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

    def placeholder(self, node: fx.Node) -> None:
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
        self.add(node, Buffer(Kind.SHARD, node, index, is_away=self.is_away(bucket)))

    def is_away(self, bucket: Bucket) -> bool:
        """Say whether a bucket lives off the device, and its moves have been put in."""
        return bucket.is_away and Fact.SHARDS_OFFLOADED in self.program.facts

    # -- names ------------------------------------------------------------------------------------
    def content(self, read: fx.Node, buffer: Buffer) -> str:
        """Name what a read value holds: the parameter where it is a view of one."""
        if buffer.kind in PARAMETERS:
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
