"""Order of copies: what leaves for the host is whole, read no more, and back before it is read."""

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


class CopyOrder(Walk):
    """The walk over a graph, with what offloads and reloads do.

    A value that leaves is read up to its offload's wait, behind which its memory is another's; its
    copy on the host is for one reload alone, and what that delivers is read behind its own wait.
    """

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        return super().handlers() | {ops.offload: self.offload, ops.reload: self.reload}

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

    def reload(self, node: fx.Node) -> None:
        host = args(node)[0]
        buffers = self.roots[host]
        if len(buffers) != 1 or buffers[0].kind is not Kind.HOSTED:
            self.fail(node, f"{node.name} reloads {name_of(host)}, which is not on the host")
        if (first := buffers[0].reloaded) is not None:
            self.fail(node, f"{name_of(host)} is reloaded twice: by {first.name} and {node.name}")
        buffers[0].reloaded = node
        self.add(node, Buffer(Kind.RELOADED, node, landed=False, source=buffers[0]))

    def wait_copy(self, node: fx.Node, launch: fx.Node) -> None:
        (buffer,) = self.roots[launch]
        if buffer.landed:
            self.fail(node, f"{launch.name} is waited for twice, the second time by {node.name}")
        buffer.landed = True
        if buffer.kind is Kind.HOSTED and buffer.source is not None:
            buffer.source.released = node
        self.roots.set(node, buffer)

    # -- what nodes read, take and return ---------------------------------------------------------
    def _read(self, node: fx.Node, read: fx.Node, buffer: Buffer) -> None:
        if buffer.kind is Kind.LEAVING and buffer.released is not None:
            self.fail(
                node,
                f"{node.name} reads {self.content(read, buffer)} after {buffer.released.name} has "
                "given its memory back; move the offload behind the last read, or reload it",
            )
        super()._read(node, read, buffer)

    def placeholder(self, node: fx.Node) -> None:
        where = info(node)
        if where.role is Role.SAVED and where.index in self.crossing.hosted:
            self.add(node, Buffer(Kind.HOSTED, node))
        else:
            super().placeholder(node)

    def _results(self, output: fx.Node) -> None:
        specs = self.program.outputs[self.name]
        position = 0
        for spec, result in zip(specs, args(output)[0], strict=True):
            for buffer in self.roots[result] if isinstance(result, fx.Node) else ():
                if buffer.kind is not Kind.HOSTED:
                    continue
                if spec.role is not Role.SAVED or self.name == BACKWARD:
                    what = f"{spec.role.value} {spec.name}".strip()
                    self.fail(output, f"{what} is {name_of(result)}, which lies on the host")
                self.crossing.hosted.add(position)
            position += spec.role is Role.SAVED
        super()._results(output)

    def finish(self) -> None:
        super().finish()
        for buffer in self.buffers:
            if buffer.kind in (Kind.HOSTED, Kind.RELOADED) and not buffer.landed:
                self.fail(buffer.made, f"{self.label(buffer)} is launched but never waited for")
