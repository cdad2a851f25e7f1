"""The schedule as straight-line Python: one statement per launch, wait, region, release."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from zerofx.codegen.names import Names
from zerofx.codegen.regions import RegionCall, RegionLibrary
from zerofx.codegen.text import describe, wrap_list, wrap_tuple
from zerofx.ir import ops
from zerofx.ir.graphs import is_glue
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, Program
from zerofx.sizes import format_bytes

RESERVED = ("rt", "shards", "buffers", "inputs", "saved", "tangents", "args", "torch", "zfx")


@dataclass
class Function:
    """Writes the statements of one graph's function."""

    program: Program
    name: str
    library: RegionLibrary
    rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.program.graph(self.name)
        self.calls = self.library.calls(self.graph)
        reserved = (*RESERVED, *(c.code.name for c in self.calls.values()))
        self.names = Names(reserved)
        self.inside = {n for c in self.calls.values() for n in c.nodes}
        self.nodes = list(self.graph.nodes)
        self.last = self._last_statement()

    # -- liveness ---------------------------------------------------------------------------
    def _statement(self, node: fx.Node) -> fx.Node:
        """Return the node at whose place the node's statement stands."""
        return self._first_of.get(node, node)

    def _last_statement(self) -> dict[fx.Node, list[fx.Node]]:
        """Return, per statement, the values that no later statement reads."""
        self._first_of = {n: first for first, c in self.calls.items() for n in c.nodes}
        position = {n: i for i, n in enumerate(self.nodes)}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            visible = node not in self.inside or node in self._outputs(node)
            if not visible or not node.users or node.target in ops.LAUNCHES or is_glue(node):
                continue
            if info(node).role is Role.SHARD or self._is_static(node):
                continue
            readers = [self._statement(u) for u in node.users]
            dying.setdefault(max(readers, key=position.__getitem__), []).append(node)
        return dying

    def _outputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self.calls[self._first_of[node]].outputs

    def _is_static(self, node: fx.Node) -> bool:
        """Say whether a value lies in a slot or a resident buffer, so that dropping it frees nothing."""
        if node.target in (ops.grad_buffer, ops.resident):
            return True
        if node.target not in (ops.wait, ops.param_view, ops.pack):
            return False
        source = node
        while source.op == "call_function" and source.target in (
            ops.wait, ops.param_view, ops.pack
        ):
            source = source.args[0]  # type: ignore[assignment]
        if source.target is ops.all_gather:
            return len(source.args) == 4 and source.args[3] >= 0  # type: ignore[operator]
        return source.op == "placeholder" and info(source).role is Role.SHARD or (
            source.target in ops.LAUNCHES | {ops.resident, ops.grad_buffer}
        )

    def _gone(self, node: fx.Node, but: set[fx.Node] = frozenset()) -> list[str]:  # type: ignore[assignment]
        return [self.names.bind(n) for n in self.last.get(node, []) if n not in but]

    # -- writing ----------------------------------------------------------------------------
    def lines(self) -> list[str]:
        """Return the function's body, one statement a row."""
        self._take_placeholders()
        index = 0
        while index < len(self.nodes):
            node = self.nodes[index]
            if node in self.calls:
                self._region(self.calls[node])
            elif node.target is ops.param_view:
                index = self._unpack(index)
                continue
            elif node not in self.inside and node.op == "call_function" and not is_glue(node):
                self._communicate(node)
            index += 1
        self._return()
        return self.rows

    def _row(self, text: str, note: str = "") -> None:
        self.rows.append(f"{text}  # {note}" if note else text)

    def _take_placeholders(self) -> None:
        saved = []
        for node in self.nodes:
            role = info(node).role
            if node.op != "placeholder":
                continue
            where, name = info(node), self.names.bind(node)
            if role is Role.SHARD:
                continue
            if role is Role.SAVED:
                saved.append(node)
                continue
            if not node.users:
                continue
            source = {
                Role.INPUT: f"inputs[{where.index}]",
                Role.BUFFER: f"buffers[{where.name!r}]",
                Role.TANGENT: f"tangents[{where.index}]",
            }[role]  # type: ignore[index]
            self._row(f"{name} = {source}", describe(value(node)))
        if self.name == BACKWARD:
            saved.sort(key=lambda n: info(n).index)
            if saved:
                self._row(f"{wrap_tuple([self.names.bind(n) for n in saved], 0)} = saved")
            self._row("saved.clear()")

    def _region(self, call: RegionCall) -> None:
        first = call.nodes[0]
        takes = [self.names.bind(n) for n in call.inputs]
        gives = [self.names.bind(n) for n in call.outputs]
        self._row(f"args = {wrap_list(takes, 11)}")
        gone = self._gone(first, but=set(call.outputs))
        if gone:
            self._row(f"del {wrap_tuple(gone, 4).removesuffix(',')}")
        unit = next((info(n).unit for n in call.nodes if info(n).unit), "")
        result = f"{wrap_tuple(gives, 0)} = " if gives else ""
        self._row(f"{result}{call.code.name}(args)", unit)

    def _unpack(self, index: int) -> int:
        """Write one `unpack` for a run of views of the same buffer; return the next index."""
        assert self.program.layout is not None
        full = self.nodes[index].args[0]
        run = []
        while self.nodes[index].target is ops.param_view and self.nodes[index].args[0] is full:
            run.append(self.nodes[index])
            index += 1
        bucket, _ = self.program.layout.where[info(run[0]).name]
        places = {p.offset: i for i, p in enumerate(bucket.params)}
        positions = tuple(places[n.args[1]] for n in run)  # type: ignore[index]
        call = f"rt.unpack({self._buffer(full)}, {bucket.index}, {positions})"
        gives = wrap_tuple([self.names.bind(n) for n in run], len(call) + 7)
        self._row(f"{gives} = {call}")
        return index

    def _buffer(self, node: fx.Node) -> str:  # type: ignore[override]
        if info(node).role is Role.SHARD:
            return f"shards[{info(node).index}]"
        return self.names.bind(node)

    def _communicate(self, node: fx.Node) -> None:
        where, target = info(node), node.target
        size = format_bytes(nbytes(value(node)))
        label = where.unit
        if target is ops.all_gather:
            slot = node.args[3] if len(node.args) == 4 else -1
            shard = self._buffer(node.args[0])  # type: ignore[arg-type]
            call = f"rt.all_gather({shard}, bucket={where.index}, slot={slot})"
            self._row(f"{self.names.bind(node)} = {call}", f"{label}  {describe(value(node))}  +{size}")
        elif target in (ops.refresh, ops.resident):
            verb = "refresh" if target is ops.refresh else "resident"
            shard = self._buffer(node.args[0])  # type: ignore[arg-type]
            self._row(f"{self.names.bind(node)} = rt.{verb}({shard}, bucket={where.index})", label)
        elif target is ops.wait:
            launched = self.names.bind(node.args[0])  # type: ignore[arg-type]
            self._row(f"{self.names.bind(node)} = rt.wait({launched})")
        elif target is ops.release:
            slot = node.args[1] if len(node.args) == 2 else -1
            self._row(f"rt.release({self._buffer(node.args[0])}, slot={slot})", f"{label}  -{self._freed(node)}")  # type: ignore[arg-type]
        elif target is ops.grad_buffer:
            slot = node.args[4] if len(node.args) == 5 else -1
            zero = f", zero={node.args[3]}" if node.args[3] else ""
            call = f"rt.grad_buffer(bucket={where.index}{zero}, slot={slot})"
            self._row(f"{self.names.bind(node)} = {call}", f"{label}  +{size}")
        elif target is ops.pack:
            self._pack(node)
            return
        elif target in ops.REDUCES:
            verb = "all_reduce" if target is ops.all_reduce else "reduce_scatter"
            packed, bucket, _, scale = node.args
            call = f"rt.{verb}({self.names.bind(packed)}, bucket={bucket}, scale={scale!r})"  # type: ignore[arg-type]
            self._row(f"{self.names.bind(node)} = {call}", label)
        elif target is ops.store_grad:
            self._row(f"rt.store_grad({self.names.bind(node.args[0])}, bucket={where.index})", label)  # type: ignore[arg-type]
        elif target is ops.sync_buffers:
            values = [self.names.bind(n) for n in node.args[0]]  # type: ignore[union-attr]
            gives = [self.names.bind(u) for u in sorted(node.users, key=lambda u: u.args[1])]
            self._row(f"{wrap_tuple(gives, 0)} = rt.sync_buffers([{', '.join(values)}])")
        else:
            raise AssertionError(f"no statement for {target}")
        if gone := self._gone(node):
            self._row(f"del {wrap_tuple(gone, 4).removesuffix(',')}")

    def _freed(self, release: fx.Node) -> str:
        return format_bytes(nbytes(value(release.args[0])))  # type: ignore[arg-type]

    def _pack(self, node: fx.Node) -> None:
        assert self.program.layout is not None
        buffer, grads, offsets = node.args
        self.names.share(node, buffer)  # type: ignore[arg-type]
        bucket = self.program.layout.buckets[info(node).index]
        places = {p.offset: i for i, p in enumerate(bucket.params)}
        positions = tuple(places[o] for o in offsets)  # type: ignore[union-attr,index]
        head = f"rt.pack({self.names.bind(buffer)}, {bucket.index}, {positions}, "  # type: ignore[arg-type]
        values = wrap_list([self.names.bind(g) for g in grads], len(head) + 5)  # type: ignore[union-attr]
        self._row(f"{head}{values})")
        if gone := self._gone(node):
            self._row(f"del {wrap_tuple(gone, 4).removesuffix(',')}")

    def _return(self) -> None:
        groups: dict[Role, list[str]] = {}
        for spec, node in zip(
            self.program.outputs[self.name], self.program.results(self.name), strict=True
        ):
            text = self._buffer(node) if isinstance(node, fx.Node) else repr(node)
            groups.setdefault(spec.role, []).append(text)
        if self.name == BACKWARD:
            self._row(f"return [{', '.join(groups.get(Role.INPUT_GRAD, []))}]")
            return
        outs = ", ".join(groups.get(Role.OUTPUT, []))
        updates = ", ".join(
            groups.get(Role.BUFFER_UPDATE, []) + groups.get(Role.INPUT_UPDATE, [])
        )
        saved = wrap_list(groups.get(Role.SAVED, []), len(outs) + len(updates) + 20)
        self._row(f"return [{outs}], [{updates}], {saved}")


