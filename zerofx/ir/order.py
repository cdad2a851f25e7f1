"""Order: which values each node of a graph may read, and which may leave the graph.

A graph is walked once, in the order in which its calls are made. A transfer occupies its memory
from its launch to its wait, and a gathered buffer occupies its slot from its launch to its release.
This is happens-before over the lanes: a lane starts a transfer after the compute launched before
it, and compute continues after a wait only once the transfer has completed.

The effect of an op on memory is the `order` of its spec, a function of this walk and the node. This
file contains the rules that hold for all ops.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from zerofx.compat.graphs import schema_of
from zerofx.ir.graphs import is_alias
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Fact, Planned, Reference
from zerofx.ir.spec import Holds, Kind, OpSpec, kind_of, spec_of
from zerofx.ir.verify_fault import fault, name_of
from zerofx.ir.verify_values import args, label_of, unread
from zerofx.layout.buckets import Bucket, Layout, ParamSlice

FULL = (Holds.GATHERED, Holds.RESIDENT, Holds.KEPT)  # what holds a whole bucket's parameters
PARAMETERS = (  # parameters at all
    *FULL, Holds.SHARD, Holds.SECONDARY, Holds.STAGED, Holds.NEAR, Holds.PARAM,
)  # fmt: skip
AWAY = {Holds.HOSTED: "is on the host", Holds.STORED: "is on NVMe"}


@dataclass(eq=False)
class Buffer:
    """A range of memory during one call, and its history so far.

    made: the node that launches or creates it.
    landed: its transfer has been waited for (True if there is none).
    released: the release that freed it; taken: the node that claimed its slot since.
    packed, zeroed, reduced: for a gradient buffer, the gradients packed at each offset, whether the
        rest is zero, and the launch of its reduction.
    source: for a reduction's result, the gradient buffer; for a copy, its source.
    stored: the op that moved a reduction's result to p.grad.
    reloaded: for a value on the host, its reload.
    written: for a value on the host, the launch that writes it to NVMe.
    updated: for a shard, the update that has overwritten it.
    is_away: for a shard and for a reduction's result, whether the bucket is kept off the device.
    offloaded: for such a result, the launch of the copy that offloads it.
    sent: for a reloaded shard, the gathered buffers that are made from it.
    behind: for a resident copy, an earlier refresh that was in flight: this one transfers nothing.
    """

    kind: Holds
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
        """Whether a transfer is writing to it or reading from it now."""
        if self.kind is Holds.PACKED:
            return self.reduced is not None and not self.landed
        return not self.landed or any(not b.landed for b in self.sent)

    def is_open_to(self, node: fx.Node) -> bool:
        """Return whether a node may read the buffer now."""
        if self.taken is not None or self.released is not None or self.updated is not None:
            return False
        spec = spec_of(node)
        takes = spec is not None and self.kind in spec.takes
        if self.kind is Holds.PACKED:
            return takes
        if self.kind in AWAY:  # forward returns or moves it, backward reloads it
            return self.landed and (takes or node.op == "output")
        if self.kind is Holds.REDUCED:
            return self.landed and takes and self._is_next(spec)
        if self.kind is Holds.SHARD and self.is_away:
            return takes
        if self.kind in (Holds.STAGED, Holds.NEAR):
            return self.landed and takes
        if self.kind is Holds.SECONDARY:  # forward returns it, backward gathers from it
            return takes or node.op == "output"
        return self.landed

    def _is_next(self, spec: OpSpec | None) -> bool:
        """Return whether an op is the next step of a reduced slice: it is offloaded, or stored."""
        is_home = not self.is_away or self.offloaded is not None
        return spec is not None and (spec.kind is Kind.STORE) == is_home


Roots = tuple[Buffer, ...]


class Aliases:
    """The buffers that each value of a graph may alias, through any chain of views."""

    def __init__(self) -> None:
        self._roots: dict[fx.Node, Roots] = {}

    def __getitem__(self, node: fx.Node) -> Roots:
        return self._roots.get(node, ())

    def set(self, node: fx.Node, *buffers: Buffer) -> None:
        self._roots[node] = buffers

    def follow(self, node: fx.Node) -> None:
        """Give a node the buffers of the inputs that its result may alias."""
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
    # views whose schema does not declare the alias (_unsafe_view) view their first argument
    return found or tuple((0, a.name) for a in arguments[:1])


def is_unread(node: fx.Node, read: fx.Node) -> bool:
    """Return whether a node takes a value only in arguments whose contents it does not read."""
    skipped = unread(node)
    if not skipped:
        return False
    read_by = [a for i, a in enumerate(args(node)) if i not in skipped]
    return not any(a is read or (isinstance(a, (list, tuple)) and read in a) for a in read_by)


def argument(node: fx.Node, position: int, default: Any = None) -> Any:
    """Return a positional argument of a zerofx op, or its default if it was omitted."""
    return node.args[position] if len(node.args) > position else default


@dataclass
class Crossing:
    """The memory that a forward graph leaves for its backward.

    kept: gathered buckets, by position. away: values off the device and their tier, by position.
    secondary: the buckets of secondary shards, by position.
    """

    kept: dict[int, int] = field(default_factory=dict)
    secondary: dict[int, int] = field(default_factory=dict)
    away: dict[int, Holds] = field(default_factory=dict)
    refreshed: set[int] = field(default_factory=set)


class Order:
    """The walk over one graph, which raises at the first node that breaks an invariant.

    buffers: all buffers of the graph so far. roots: the buffers that a value aliases.
    slots: slot -> the last buffer that took it. known: the visited nodes.
    filling, reduced, updates: bucket -> its gradient buffer, its reduction's result, its update.
    expected: by bucket and offset, the parameters whose gradients the captured graph has.
    paused: the pause that the walk has passed.
    """

    def __init__(self, program: Planned, graph: str, crossing: Crossing) -> None:
        self.program, self.name, self.crossing = program, graph, crossing
        self.known: set[fx.Node] = set()
        self.roots = Aliases()
        self.buffers: list[Buffer] = []
        self.slots: dict[int, Buffer] = {}
        self.filling: dict[int, Buffer] = {}
        self.reduced: dict[int, Buffer] = {}
        self.updates: dict[int, fx.Node] = {}
        self.paused: fx.Node | None = None
        self.expected = self._expect() if graph == BACKWARD else None
        self._written = {
            (Role.BUFFER if s.role is Role.BUFFER_UPDATE else Role.INPUT, s.name)
            for s in program.outputs.get(FORWARD, ())
            if s.role in (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
        }

    def _expect(self) -> dict[int, dict[int, ParamSlice]] | None:
        reference = self.program.reference
        if not isinstance(reference, Reference):
            return None
        expected: dict[int, dict[int, ParamSlice]] = {}
        for bucket in self.program.layout.buckets:
            for param in bucket.params:
                if label_of(Role.GRAD, param.name) in reference.outputs:
                    expected.setdefault(bucket.index, {})[param.offset] = param
        return expected

    @property
    def layout(self) -> Layout:
        return self.program.layout

    def check(self) -> None:
        for node in self.program.graph(self.name).nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            else:
                if self.paused is not None and info(node).is_random:
                    self.fail(node, f"{node.name} draws random numbers after {self.paused.name}.")
                self._reads(node)
                if node.op == "output":
                    self._results(node)
                elif (spec := spec_of(node)) is not None:
                    if spec.in_backward and self.name != BACKWARD:
                        self.fail(
                            node,
                            f"{node.name} is a gradient op: those belong into backward only.",
                        )
                    spec.order(self, node)
                else:
                    self.roots.follow(node)
            self.known.add(node)
        self._finish()

    # -- queries of the ops' own checks -----------------------------------------------------------
    def fail(self, node: fx.Node, message: str) -> NoReturn:
        raise fault(self.program, self.name, node, message)

    def add(self, node: fx.Node, buffer: Buffer) -> None:
        self.buffers.append(buffer)
        self.roots.set(node, buffer)

    def claim(self, node: fx.Node, buffer: Buffer) -> None:
        """Assign a buffer to the slot that it names, and mark the old content as overwritten."""
        if buffer.slot == -1:
            return
        sizes = self.program.slot_bytes
        slot, wanted = buffer.slot, nbytes(value(node))
        if not 0 <= slot < len(sizes):
            self.fail(node, f"{node.name} names slot {slot}. The program has {len(sizes)}.")
        if wanted > sizes[slot]:
            self.fail(node, f"{node.name} needs {wanted} bytes. Slot {slot} holds {sizes[slot]}.")
        holder = self.slots.get(slot)
        if holder is not None and holder.released is None:
            if holder.in_flight:
                self.fail(
                    node,
                    f"slots overlap: {node.name} puts {self.label(buffer)} into slot {slot} while "
                    f"{self.label(holder)} is in flight there. Use another slot, or wait first.",
                )
            holder.taken = node  # wrong only if something still uses what it held
        elif holder is not None:
            holder.taken = node
        self.slots[slot] = buffer

    def bucket(self, node: fx.Node) -> Bucket:
        """Return the bucket that a node names."""
        spec = spec_of(node)
        assert spec is not None and spec.bucket is not None, f"{node.name} names no bucket"
        index = argument(node, spec.bucket)
        if type(index) is not int or not 0 <= index < len(self.layout.buckets):
            num = len(self.layout.buckets)
            self.fail(node, f"{node.name} names bucket {index!r}. The layout has {num}.")
        return self.layout.buckets[index]

    def numel(self, node: fx.Node, wanted: int, of: str) -> None:
        given = argument(node, 2)
        if given != wanted or value(node).numel() != wanted:
            self.fail(node, f"{node.name} has {given} elements; {of} has {wanted}.")

    def dtype(self, node: fx.Node, wanted: torch.dtype, of: str) -> None:
        if value(node).dtype is not wanted:
            self.fail(node, f"{node.name} is {value(node).dtype}; {of} is {wanted}.")

    def own_shard(self, node: fx.Node, bucket: Bucket) -> None:
        """Check that a node receives the shard of its own bucket."""
        shard = args(node)[0]
        where = info(shard)
        if where.role is not Role.SHARD or where.index != bucket.index:
            self.fail(
                node,
                f"{node.name} of bucket {bucket.index} ({bucket.label()}) is given "
                f"{name_of(shard)}, which is not its shard.",
            )

    def check_landed(self, node: fx.Node, buffer: Buffer) -> None:
        """Check that a wait delivers data: everything has arrived with this launch or earlier."""
        first = buffer.behind
        if first is not None and not first.landed:
            self.fail(
                node,
                f"{node.name} waits for {buffer.made.name}, which moves nothing: "
                f"{first.made.name}, launched before it, does. Wait for that one first.",
            )

    def is_away(self, bucket: Bucket) -> bool:
        """Return whether a bucket is kept off the device and its moves have been inserted."""
        return bucket.is_away and Fact.SHARDS_OFFLOADED in self.program.facts

    def content(self, read: fx.Node, buffer: Buffer) -> str:
        """Name the content of a read value: the parameter if the value is a view of one."""
        if buffer.kind in PARAMETERS:
            view = read
            while view.op == "call_function" and kind_of(view) is not Kind.VIEW:
                if spec_of(view) is not None or not view.all_input_nodes:
                    break
                view = view.all_input_nodes[0]
            if kind_of(view) is Kind.VIEW:
                return f"{name_of(view)}, a parameter of {self.label(buffer)},"
        return self.label(buffer)

    def label(self, buffer: Buffer) -> str:
        if buffer.bucket < 0:
            return f"{buffer.kind.value} {name_of(buffer.made)}"
        label = self.layout.buckets[buffer.bucket].label()
        return f"{buffer.kind.value} bucket {buffer.bucket} ({label})"

    # -- inputs of the graph ----------------------------------------------------------------------
    def _placeholder(self, node: fx.Node) -> None:
        where = info(node)
        if where.role is Role.SHARD:
            self._shard(node, where.index)
        elif where.role is Role.SAVED and where.index in self.crossing.away:
            self.add(node, Buffer(self.crossing.away[where.index], node))
        elif where.role is Role.SAVED and where.index in self.crossing.kept:
            self.add(node, Buffer(Holds.KEPT, node, self.crossing.kept[where.index]))
        elif where.role is Role.SAVED and where.index in self.crossing.secondary:
            self.add(node, Buffer(Holds.SECONDARY, node, self.crossing.secondary[where.index]))
        elif where.role is Role.PARAM:
            if Fact.PARAMS_SHARDED in self.program.facts:
                self.fail(node, f"{where.name} is read whole, but parameters are sharded.")
            self.add(node, Buffer(Holds.PARAM, node))
        elif (where.role, where.name) in self._written:
            self.add(node, Buffer(Holds.STATE, node))

    def _shard(self, node: fx.Node, index: int) -> None:
        if not 0 <= index < len(self.layout.buckets):
            num = len(self.layout.buckets)
            self.fail(node, f"{node.name} is a shard of bucket {index}. The layout has {num}.")
        bucket = self.layout.buckets[index]
        wanted, given = self.layout.shard_numel(bucket), value(node).numel()
        if given != wanted or value(node).dtype != bucket.dtype:
            self.fail(
                node,
                f"{node.name} holds {given} elements of {value(node).dtype}; the shard of bucket "
                f"{index} has {wanted} of {bucket.dtype}.",
            )
        self.add(node, Buffer(Holds.SHARD, node, index, is_away=self.is_away(bucket)))

    # -- the values that a node reads -------------------------------------------------------------
    def _reads(self, node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read not in self.known:
                self.fail(node, f"{node.name} reads {name_of(read)} before it is computed.")
            is_under_way = kind_of(read) is Kind.LAUNCH
            for buffer in self.roots[read]:
                is_open = buffer.is_open_to(node) and not is_under_way
                if not is_open and not is_unread(node, read):
                    self._read(node, read, buffer, is_under_way)

    def _read(self, node: fx.Node, read: fx.Node, buffer: Buffer, is_under_way: bool) -> None:
        """Raise if a node may not read a value that aliases this buffer, with the reason."""
        what, reader = self.content(read, buffer), _reader(node)
        kind = kind_of(node)
        if buffer.kind in AWAY and buffer.released is not None and kind is not Kind.WAIT:
            self.fail(
                node,
                f"{name_of(node)} reads {what} after {buffer.released.name} "
                "has freed its memory. Move it before that wait, or read it from there.",
            )
        if buffer.kind is Holds.LEAVING and buffer.released is not None:
            self.fail(
                node,
                f"{node.name} reads {what} after {buffer.released.name} has "
                "freed its memory. Move the offload after the last read, or reload it.",
            )
        if kind is Kind.WAIT and read in (buffer.made, buffer.offloaded):
            return
        if is_under_way:
            self.fail(
                node,
                f"{reader} reads {what} before its wait: only what `wait` returns may be read.",
            )
        if not buffer.landed and buffer.kind is not Holds.PACKED:
            self.fail(node, f"{reader} reads {what} before its wait. Move the wait before it.")
        if buffer.released is not None and kind is not Kind.RELEASE:
            self.fail(
                node,
                f"{reader} reads {what} after its release. Move the release after the last "
                "read, or gather the bucket again.",
            )
        if buffer.updated is not None:
            self.fail(
                node,
                f"{reader} reads {what} after {buffer.updated.name} has put the optimizer's new "
                "values there. Move the update after the last read.",
            )
        if buffer.taken is not None:
            self.fail(
                node,
                f"{reader} uses {what} in slot {buffer.slot} after {buffer.taken.name}, which "
                "puts another buffer there. Give one of the two another slot, or move them apart.",
            )
        if buffer.kind in _MEANT and not (buffer.released and kind is Kind.RELEASE):
            self.fail(node, f"{reader} reads {what}: {_MEANT[buffer.kind]}.")

    # -- results of the graph ---------------------------------------------------------------------
    def _results(self, output: fx.Node) -> None:
        specs = self.program.outputs[self.name]
        rows = list(zip(specs, args(output)[0], strict=True))
        for check in (self._result_off_device, self._result):
            position = 0
            for spec, result in rows:
                if isinstance(result, fx.Node):
                    check(output, spec.role, spec.name, result, position)
                position += spec.role is Role.SAVED

    def _result_off_device(
        self, output: fx.Node, role: Role, name: str, result: fx.Node, position: int
    ) -> None:
        for buffer in self.roots[result]:
            if buffer.kind not in AWAY:
                continue
            if role is not Role.SAVED or self.name == BACKWARD:
                what = f"{role.value} {name}".strip()
                self.fail(output, f"{what} is {name_of(result)}, which {AWAY[buffer.kind]}.")
            if buffer.written is not None:
                self.fail(
                    output,
                    f"saves {name_of(result)}, which {buffer.written.name} takes on to NVMe. "
                    "Save what its wait returns.",
                )
            self.crossing.away[position] = buffer.kind

    def _result(
        self, output: fx.Node, role: Role, name: str, result: fx.Node, position: int
    ) -> None:
        if role is Role.SAVED:
            self._saved(result, position)
        elif role in (Role.OUTPUT, Role.INPUT_GRAD):
            self._handed_out(result, f"{role.value} {name}")

    def _handed_out(self, result: fx.Node, what: str) -> None:
        for buffer in self.roots[result]:
            if buffer.kind in PARAMETERS:
                held = self.content(result, buffer)
                self.fail(result, f"{what} looks into {held}, which changes later. Clone it.")

    def _saved(self, result: fx.Node, position: int) -> None:
        for buffer in self.roots[result]:
            what = self.content(result, buffer)
            is_whole = kind_of(result) is Kind.WAIT
            if buffer.kind is Holds.GATHERED and is_whole and buffer.slot == -1:
                self.crossing.kept[position] = buffer.bucket
            elif buffer.kind is Holds.SECONDARY and kind_of(result) is Kind.MAKE:
                self.crossing.secondary[position] = buffer.bucket
            elif buffer.kind is Holds.GATHERED and buffer.slot >= 0:
                self.fail(
                    result,
                    f"saves {what} for backward, but it is in slot {buffer.slot}, which the next "
                    "call overwrites. Gather with slot=-1, or again in backward.",
                )
            elif buffer.kind in PARAMETERS:
                self.fail(
                    result,
                    f"saves {name_of(result)} for backward, a view of {what}. Gather the "
                    "parameter again in backward.",
                )
            elif buffer.kind is Holds.STATE:
                self.fail(
                    result,
                    f"saves {name_of(buffer.made)} for backward, which is updated after forward. "
                    "Save a clone.",
                )

    # -- conditions at the end of the graph -------------------------------------------------------
    def _finish(self) -> None:
        for kinds in (_TRANSFERRED, (*AWAY, Holds.RELOADED, Holds.CONVERTED)):
            for buffer in self.buffers:
                if buffer.kind in kinds and not buffer.landed:
                    self.fail(
                        buffer.made, f"{self.label(buffer)} is launched but never waited for."
                    )
        if self.name == BACKWARD:
            self._finish_gradients()
            self._finish_updates()

    def _finish_gradients(self) -> None:
        for buffer in self.reduced.values():
            if not buffer.landed:
                self.fail(buffer.made, f"{self.label(buffer)} is launched but never waited for.")
            if buffer.stored is None:
                self.fail(buffer.made, f"{self.label(buffer)} is never stored: its gradients stay.")
        if Fact.GRADS_REDUCED not in self.program.facts:
            return
        output = self.program.graph(self.name).output_node()
        for index, params in (self.expected or {}).items():
            if index not in self.reduced:
                name = next(iter(params.values())).name
                self.fail(
                    output,
                    f"the gradient of {name} is never reduced: backward has no reduction of "
                    f"bucket {index}.",
                )
        specs = self.program.outputs[self.name]
        for spec, result in zip(specs, args(output)[0], strict=True):
            if spec.role is not Role.SHARD_GRAD:
                continue
            stored = self.reduced[spec.index].stored if spec.index in self.reduced else None
            if stored is not result:
                self.fail(output, f"returns {result} as the gradient shard of bucket {spec.index}.")

    def _finish_updates(self) -> None:
        """Check that backward updates either every bucket that it reduces, or none."""
        output = self.program.graph(self.name).output_node()
        in_backward = self.program.plan.update == "in-backward"
        if self.updates and not in_backward:
            node = next(iter(self.updates.values()))
            self.fail(node, f"{node.name} updates parameters, but the plan's update is 'step'.")
        if not in_backward or Fact.UPDATES_PLACED not in self.program.facts:
            return
        for index, buffer in self.reduced.items():
            if index not in self.updates:
                self.fail(output, f"{self.label(buffer)} is never updated. Its gradient is lost.")


def _reader(node: fx.Node) -> str:
    if kind_of(node) is Kind.VIEW:
        return f"the view of {name_of(node)}"
    return name_of(node) if node.op == "output" else node.name


_TRANSFERRED = (Holds.GATHERED, Holds.RESIDENT, Holds.STAGED, Holds.NEAR)
_MEANT = {
    Holds.PACKED: "a gradient buffer is for pack and reduce only",
    Holds.REDUCED: "a reduced slice is for store_grad only, after offload_grad if the bucket "
    "is kept off the device",
    Holds.SHARD: "it is kept off the device. Reload it first",
    Holds.STAGED: "it is in host memory. Reload it first",
    Holds.SECONDARY: "a secondary shard is for backward's gather of its bucket only",
    Holds.NEAR: "a reloaded shard is for the all-gather of its bucket only",
    Holds.HOSTED: "a value on the host is for reload or write_out only",
    Holds.STORED: "a value on NVMe is for read_back only",
}
