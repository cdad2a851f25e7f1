"""Order of copies: what leaves for host or NVMe is whole, read no more, and back in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD
from zerofx.ir.verify_buffers import Buffer, Kind, alias_inputs, args
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_order import Walk

_AWAY = {Kind.HOSTED: "lies on the host", Kind.STORED: "lies on NVMe"}


class CopyOrder(Walk):
    """The walk over a graph, with what offloads and reloads do, and the ways on to NVMe and back.

    A value that leaves is read up to its offload's wait, behind which its memory is another's; its
    copy on the host is for one reload alone, and what that delivers is read behind its own wait.
    A copy that is written out is gone from the host behind that wait; what is on NVMe is for reads
    alone, behind whose waits it is on the host again.
    """

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        return super().handlers() | {
            ops.offload: self.offload,
            ops.reload: self.reload,
            ops.write_out: self.write_out,
            ops.read_back: self.read_back,
        }

    def offload(self, node: fx.Node) -> None:
        x = args(node)[0]
        if any(b.kind is Kind.LEAVING for b in self.roots[x]):
            self.fail(node, f"{node.name} offloads {name_of(x)} a second time")
        if x.op != "call_function" or self.roots[x]:
            held = self.content(x, self.roots[x][0]) if self.roots[x] else f"{name_of(x)}, given"
            self.fail(node, f"{node.name} offloads {held}: only a value of forward's own may leave")
        if (root := alias_source(x)) is not x:
            self.fail(node, f"{node.name} offloads {x.name}, a view; offload {root.name} whole")
        leaving = Buffer(Kind.LEAVING, x)
        views = [x]
        while views:
            view = views.pop()
            self.roots.set(view, leaving)
            views += [u for u in view.users if u in self._known and view in alias_inputs(u)]
        self.add(node, Buffer(Kind.HOSTED, node, landed=False, source=leaving))

    def write_out(self, node: fx.Node) -> None:
        hosted = self._on(Kind.HOSTED, node, "writes")
        self._is_first(node, hosted, "written")
        hosted.written = node
        self.add(node, Buffer(Kind.STORED, node, landed=False, source=hosted))

    def read_back(self, node: fx.Node) -> None:
        stored = self._on(Kind.STORED, node, "reads")
        self.add(node, Buffer(Kind.HOSTED, node, landed=False, source=stored))

    def reload(self, node: fx.Node) -> None:
        hosted = self._on(Kind.HOSTED, node, "reloads")
        self._is_first(node, hosted, "reloaded")
        hosted.reloaded = node
        self.add(node, Buffer(Kind.RELOADED, node, landed=False, source=hosted))

    def _on(self, kind: Kind, node: fx.Node, verb: str) -> Buffer:
        """Return what a node moves, which must lie where it moves it from."""
        moved = args(node)[0]
        buffers = self.roots[moved]
        if len(buffers) != 1 or buffers[0].kind is not kind:
            where = _AWAY[kind].replace("lies", "is not")
            self.fail(node, f"{node.name} {verb} {name_of(moved)}, which {where}")
        return buffers[0]

    def _is_first(self, node: fx.Node, moved: Buffer, verb: str) -> None:
        """Check that a copy goes one way, once."""
        first = moved.reloaded or moved.written
        if first is not None and first.target is node.target:
            what = name_of(args(node)[0])
            self.fail(node, f"{what} is {verb} twice: by {first.name} and {node.name}")
        if first is not None:
            what = name_of(args(node)[0])
            self.fail(node, f"{node.name} moves {what}, which {first.name} has moved already")

    def wait_copy(self, node: fx.Node, launch: fx.Node) -> None:
        (buffer,) = self.roots[launch]
        if buffer.landed:
            self.fail(node, f"{launch.name} is waited for twice, the second time by {node.name}")
        buffer.landed = True
        source = buffer.source if buffer.kind in _AWAY else None
        if source is not None and source.kind is not Kind.STORED:  # a file's is the whole call's
            source.released = node
        self.roots.set(node, buffer)

    # -- what nodes read, take and return ---------------------------------------------------------
    def _read(self, node: fx.Node, read: fx.Node, buffer: Buffer) -> None:
        is_gone = buffer.kind in _AWAY and buffer.released is not None
        if is_gone and node.target is not ops.wait:
            self.fail(
                node,
                f"{name_of(node)} reads {self.content(read, buffer)} after {buffer.released.name} "
                "has given its place back; move it before that wait, or read it from there",
            )
        if buffer.kind is Kind.LEAVING and buffer.released is not None:
            self.fail(
                node,
                f"{node.name} reads {self.content(read, buffer)} after {buffer.released.name} has "
                "given its memory back; move the offload behind the last read, or reload it",
            )
        super()._read(node, read, buffer)

    def placeholder(self, node: fx.Node) -> None:
        where = info(node)
        if where.role is Role.SAVED and where.index in self.crossing.away:
            self.add(node, Buffer(self.crossing.away[where.index], node))
        else:
            super().placeholder(node)

    def _results(self, output: fx.Node) -> None:
        specs = self.program.outputs[self.name]
        position = 0
        for spec, result in zip(specs, args(output)[0], strict=True):
            for buffer in self.roots[result] if isinstance(result, fx.Node) else ():
                if buffer.kind not in _AWAY:
                    continue
                if spec.role is not Role.SAVED or self.name == BACKWARD:
                    what = f"{spec.role.value} {spec.name}".strip()
                    self.fail(output, f"{what} is {name_of(result)}, which {_AWAY[buffer.kind]}")
                if buffer.written is not None:
                    self.fail(
                        output,
                        f"saves {name_of(result)}, which {buffer.written.name} takes on to NVMe; "
                        "save what its wait returns",
                    )
                self.crossing.away[position] = buffer.kind
            position += spec.role is Role.SAVED
        super()._results(output)

    def finish(self) -> None:
        super().finish()
        for buffer in self.buffers:
            if buffer.kind in (*_AWAY, Kind.RELOADED) and not buffer.landed:
                self.fail(buffer.made, f"{self.label(buffer)} is launched but never waited for")
