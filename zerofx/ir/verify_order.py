"""Order: what each node of a graph may read at the place where it stands, and what may leave it.

A graph is walked once, in the order in which its calls are made. A transfer occupies its memory
from its launch to its wait, a gathered buffer its slot from its launch to its release: this is
happens-before over the lanes, since a lane starts a transfer after the compute launched before it
and compute continues behind a wait only once it has landed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.meta import Role
from zerofx.ir.program import Program
from zerofx.ir.verify_buffers import PARAMETERS, Buffer, Kind, args, unread
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_sources import Crossing, Sources


class Walk(Sources):
    """Walks one graph and raises at the first node that breaks an invariant.

    What each zerofx op does to the buffers is a method of a subclass, looked up in `handlers()`.
    """

    def __init__(self, program: Program, graph: str, crossing: Crossing) -> None:
        super().__init__(program, graph, crossing)
        self._known: set[fx.Node] = set()

    def check(self) -> None:
        handlers = self.handlers()
        for node in self.program.graph(self.name).nodes:
            if node.op == "placeholder":
                self.placeholder(node)
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
            if buffer.kind in (Kind.GATHERED, Kind.RESIDENT, *_MOVED) and not buffer.landed:
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
        if node.target is ops.wait and read in (buffer.made, buffer.offloaded):
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
        if buffer.kind in _MEANT and not (buffer.released and node.target is ops.release):
            self.fail(node, f"{reader} reads {what}: {_MEANT[buffer.kind]}")

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
            if buffer.kind in PARAMETERS:
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
            elif buffer.kind in PARAMETERS:
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


_MOVED = (Kind.STAGED, Kind.NEAR)
_UNDER_WAY = ops.TRANSFERS
_MEANT = {
    Kind.PACKED: "a gradient buffer is for pack and reduce only",
    Kind.REDUCED: "a reduced slice is for store_grad only, behind offload_grad where the bucket "
    "lives off the device",
    Kind.SHARD: "it lives off the device; reload it first",
    Kind.STAGED: "it lies in host memory; reload it first",
    Kind.NEAR: "a reloaded shard is for the all-gather of its bucket only",
    Kind.HOSTED: "a value on the host is for reload or write_out only",
    Kind.STORED: "a value on NVMe is for read_back only",
}


def is_unread(node: fx.Node, read: fx.Node) -> bool:
    """Say whether a node takes a value only in places where it does not look at it."""
    skipped = unread(node)
    if not skipped:
        return False
    read_by = [a for i, a in enumerate(args(node)) if i not in skipped]
    return not any(a is read or (isinstance(a, (list, tuple)) and read in a) for a in read_by)
