"""The schedule as straight-line Python: one statement per launch, wait, region, release."""

from __future__ import annotations

import base64
import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.kernels import tensor_args
from zerofx.codegen.regions import RegionCall, RegionLibrary
from zerofx.codegen.text import identifier, literal, with_comment, wrap_list, wrap_tuple
from zerofx.compat.graphs import FakeTensor, argument_names
from zerofx.errors import CaptureError
from zerofx.ir.graphs import is_glue, pause_of
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.names import op_stem
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.sizes import NUMBER, describe_node
from zerofx.ir.spec import Kind, kind_of, spec_of
from zerofx.layout.tiers import Tier
from zerofx.plan.sizes import format_bytes

# -- Names of the schedule's values: from the user's model, unique within a function ---------------


class Names:
    """The identifiers of a function's values, one per node."""

    def __init__(self, reserved: tuple[str, ...] = ()) -> None:
        self.taken = set(reserved)
        self.of: dict[fx.Node, str] = {}

    def bind(self, node: fx.Node) -> str:
        """Return the node's name, creating it on first use."""
        if node not in self.of:
            self.of[node] = self._free(self._stem(node))
        return self.of[node]

    def share(self, node: fx.Node, other: fx.Node) -> None:
        """Give a node the name of another one (a pack has the name of its buffer)."""
        self.of[node] = self.bind(other)

    def _free(self, stem: str) -> str:
        name, k = stem, 1
        while name in self.taken:
            k += 1
            name = f"{stem}_{k}"
        self.taken.add(name)
        return name

    def _stem(self, node: fx.Node) -> str:
        where = info(node)
        if stem := op_stem(node):
            return stem
        if where.role in (Role.INPUT, Role.BUFFER):
            return identifier(where.name) or node.name
        if where.role is Role.TANGENT:
            return f"grad_{identifier(where.name) or node.name}"
        if where.role is Role.SAVED:
            name = identifier(where.name)
            if (tier := _waits_in(node)) is not Tier.DEVICE:
                name = f"{name}_on_{tier.value}"
            return f"{identifier(where.unit)}_{name}" if where.unit else name
        base = node.name
        if node.target is operator.getitem:
            base = f"{node.args[0].name}_{node.args[1]}"  # type: ignore[union-attr]
        return f"{identifier(where.unit)}_{base}" if where.unit else identifier(base)


def _waits_in(node: fx.Node) -> Tier:
    """Return the tier that holds a saved value: the tier from which backward brings it back."""
    for user in node.users:
        spec = spec_of(user)
        if spec is not None and spec.is_copy:
            return Tier.HOST if spec.lands is Tier.DEVICE else Tier.NVME
    return Tier.DEVICE


# -- Tensors created in forward itself (`torch.tensor([...])`), as source --------------------------


LEGIBLE = 64  # up to this many elements a constant is written as numbers, not as base64
_WRITTEN = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64,
            torch.int32, torch.int16, torch.int8, torch.uint8)  # fmt: skip


def constant_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph that represent constants and are read."""
    return [n for n in graph.nodes if n.op == "get_attr" and n.users]


def constant_name(node: fx.Node) -> str:
    """Return the name of a constant in constants.py."""
    return identifier(str(node.target))


def constants_source(program: Planned) -> str:
    """Return the text of constants.py, or "" if the program has no constants."""
    found: dict[str, str] = {}
    for gm in program.graphs.values():
        for node in constant_nodes(gm.graph):
            held: Any = gm
            for part in str(node.target).split("."):
                held = getattr(held, part)
            if held.is_meta or isinstance(held, FakeTensor):
                raise CaptureError(
                    f"{program.model_name}.forward reads a tensor of shape {list(held.shape)} "
                    f"({info(node).line}) that has no values (it is on meta) and is no buffer. "
                    "Register it with register_buffer, or make it inside forward."
                )
            found[constant_name(node)] = _written(held, value(node).device.type)
    if not found:
        return ""
    rows = [f"{name} = {text}" for name, text in sorted(found.items())]
    head = '"""Tensors that forward holds itself; no parameters, no buffers."""'
    return "\n".join([head, "", "from zerofx import runtime as zfx", "", *rows, ""])


def _written(held: Tensor, device: str) -> str:
    dtype = str(held.dtype).removeprefix("torch.")
    form = f"{dtype!r}, {tuple(held.shape)}, {tuple(held.stride())}, {device!r}"
    if held.numel() <= LEGIBLE and held.dtype in _WRITTEN:
        return f"zfx.constant({literal(held.tolist(), {})}, {form})"
    flat = held.detach().cpu().contiguous().view(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return f"zfx.constant({data!r}, {form})"


# -- The schedule as straight-line Python: one statement per launch, wait, region, release ---------


RESERVED = (
    "rt", "shards", "buffers", "constants", "kernels", "inputs", "saved", "tangents", "args",
    "torch", "zfx",
)  # fmt: skip


_PASSED_ON = frozenset({Kind.WAIT, Kind.VIEW, Kind.PACK})


@dataclass
class Function:
    """The writer of the statements of one graph's function."""

    program: Planned
    name: str
    library: RegionLibrary
    rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.program.graph(self.name)
        self.calls = self.library.calls(self.graph)
        sizes = (s.name for s in self.program.sizes.symbols)
        reserved = (*RESERVED, *(c.code.name for c in self.calls.values()), *sizes)
        self.names = Names(reserved)
        self.inside = {n for c in self.calls.values() for n in c.nodes}
        self.nodes = list(self.graph.nodes)
        self.pause = pause_of(self.graph)
        self.last = self._last_statement()

    # -- liveness ---------------------------------------------------------------------------
    def _statement(self, node: fx.Node) -> fx.Node:
        """Return the node at whose position the node's statement is written."""
        return self._first_of.get(node, node)

    def _last_statement(self) -> dict[fx.Node, list[fx.Node]]:
        """Return, per statement, the values that no later statement reads."""
        self._first_of = {n: first for first, c in self.calls.items() for n in c.nodes}
        position = {n: i for i, n in enumerate(self.nodes)}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            visible = node not in self.inside or node in self._outputs(node)
            is_launch = kind_of(node) is Kind.LAUNCH  # its wait releases all inputs
            is_named = not is_glue(node) or _is_unpacked(node)
            if not visible or not node.users or is_launch or not is_named:
                continue
            if info(node).role is Role.SHARD or self._is_static(node):
                continue
            if any(kind_of(u) is Kind.PACK and u.args[0] is node for u in node.users):
                continue  # the filled buffer keeps the same name
            readers = [self._statement(u) for u in node.users if not self._is_handed_out(node, u)]
            dying.setdefault(max(readers, key=position.__getitem__), []).append(node)
        return dying

    def _is_handed_out(self, node: fx.Node, reader: fx.Node) -> bool:
        """Return whether a result leaves at the pause, and not at the end."""
        return reader.op == "output" and self.pause in node.users

    def _outputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self.calls[self._first_of[node]].outputs

    def _is_static(self, node: fx.Node) -> bool:
        """Return whether dropping a value frees nothing: it is in a slot or a resident buffer."""
        source = node
        while kind_of(source) in _PASSED_ON:
            source = source.all_input_nodes[0]
        if source.op == "placeholder":
            return source is not node and info(source).role is Role.SHARD
        spec = spec_of(source)
        return spec is not None and spec.is_static(source, self.program.layout)

    # -- queries of the ops' own statements -------------------------------------------------
    def bind(self, node: fx.Node) -> str:
        """Return the name of a node's value."""
        return self.names.bind(node)

    def buffer(self, node: fx.Node) -> str:
        """Name a flat buffer: a shard by its index in `shards`, any other by its own name."""
        if info(node).role is Role.SHARD:
            return f"shards[{info(node).index}]"
        return self.names.bind(node)

    def size(self, node: fx.Node) -> str:
        """Return the bytes of a node's value, as comments show them."""
        return format_bytes(nbytes(value(node)))

    def method(self, node: fx.Node) -> str:
        """Return the engine's method that a node's statement calls."""
        spec = spec_of(node)
        assert spec is not None, f"{node} calls no op of zerofx"
        return spec.call

    # -- writing ----------------------------------------------------------------------------
    def lines(self) -> list[str]:
        """Return the function's body, one statement per row."""
        if self.name != BACKWARD:
            self._take_sizes()
        self._take_placeholders()
        index = 0
        while index < len(self.nodes):
            node = self.nodes[index]
            if node in self.calls and self.calls[node].kernel is not None:
                self._kernel(self.calls[node])
            elif node in self.calls:
                self._region(self.calls[node])
            elif kind_of(node) is Kind.VIEW:
                index = self._unpack(index)
                continue
            elif self.pause is not None and node is self.pause:
                self._pause(node)
            elif node not in self.inside and node.op == "call_function" and not is_glue(node):
                self._communicate(node)
            index += 1
        self._return()
        return self.rows

    def _row(self, text: str, *fields: str) -> None:
        self.rows.append(with_comment(text, *fields))

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
            self._row(f"{name} = {source}", describe_node(node))
        for node in constant_nodes(self.graph):
            source = f"constants.{constant_name(node)}"
            self._row(f"{self.names.bind(node)} = {source}", describe_node(node))
        if self.name == BACKWARD:
            saved.sort(key=lambda n: info(n).index)
            if taken := [*(self.names.bind(n) for n in saved), *self._crossing_sizes()]:
                self._row(f"{wrap_tuple(taken, 0)} = saved")
            self._row("saved.clear()")
            if self.pause is not None:  # the frame would keep them until the second part has run
                self._row("tangents.clear()")

    def _take_sizes(self) -> None:
        """Write the varying sizes: forward reads them from its inputs and saves backward's."""
        read = {name for call in self.calls.values() for name in call.sizes}
        read.update(self._crossing_sizes())
        for symbol in self.program.sizes.symbols:
            if symbol.name in read:
                first = symbol.dims[0]
                text = f"{symbol.name} = inputs[{first.leaf}]"
                if first.dim != NUMBER:
                    text += f".{'stride' if first.is_stride else 'size'}({first.dim})"
                self._row(text, ", ".join(map(str, symbol.dims)))

    def _crossing_sizes(self) -> list[str]:
        """Return the names of the sizes that forward saves for backward, after all tensors."""
        if not self.program.sizes or BACKWARD not in self.program.graphs:
            return []
        calls = RegionLibrary().calls(self.program.graph(BACKWARD))
        read = {name for call in calls.values() for name in call.sizes}
        return [s.name for s in self.program.sizes.symbols if s.name in read]

    def _region(self, call: RegionCall) -> None:
        first = call.nodes[0]
        takes = [*(self.names.bind(n) for n in call.inputs), *call.sizes]
        gives = [self.names.bind(n) for n in call.outputs]
        self._row(f"args = {wrap_list(takes, 11)}")
        self._drop(first, but=call.outputs)
        unit = next((info(n).unit for n in call.nodes if info(n).unit), "")
        result = f"{wrap_tuple(gives, 0)} = " if gives else ""
        self._row(f"{result}{call.code.name}(args)", unit)

    def _kernel(self, call: RegionCall) -> None:
        """Write the call of a fused node's kernel; `_` receives results that nothing reads."""
        node = call.nodes[0]
        takes = tensor_args(node.target, node.args)
        items = {n.args[1]: n for n in call.outputs if n is not node}
        gives = [self.names.bind(node)] if node in call.outputs else []
        if isinstance(value(node), tuple):
            gives = [
                self.names.bind(items[i]) if i in items else "_" for i in range(len(value(node)))
            ]
        texts = (self.names.bind(a) if isinstance(a, fx.Node) else repr(a) for a in takes)
        # on one line: its comment names the unit of the call
        self._row(f"{', '.join(gives)} = {call.code.name}({', '.join(texts)})", info(node).unit)
        self._drop(node, but=call.outputs, also=("_",) if "_" in gives else ())

    def _unpack(self, index: int) -> int:
        """Write one `unpack` for a run of views of the same buffer; return the next index."""
        full = self.nodes[index].args[0]
        run = []
        while kind_of(self.nodes[index]) is Kind.VIEW and self.nodes[index].args[0] is full:
            run.append(self.nodes[index])
            index += 1
        bucket, _ = self.program.layout.where[info(run[0]).name]
        places = {p.offset: i for i, p in enumerate(bucket.params)}
        positions = tuple(places[n.args[1]] for n in run)  # type: ignore[index]
        call = f"rt.unpack({self.buffer(full)}, {bucket.index}, {positions})"
        gives = wrap_tuple([self.names.bind(n) for n in run], len(call) + 7)
        self._row(f"{gives} = {call}")
        self._drop(*run)  # a buffer kept from forward: its views hold it from here on
        return index

    def _pause(self, node: fx.Node) -> None:
        """Write the pause of backward, over which its frame keeps none of what it hands out."""
        given: Any = node.args[0]
        self._row(f"args = {wrap_list([self.names.bind(n) for n in given], 11)}")
        self._drop(node)
        self._row(f"yield rt.{self.method(node)}(args)", "gradients of weights may wait")

    def _communicate(self, node: fx.Node) -> None:
        spec = spec_of(node)
        assert spec is not None, f"{node} is neither compute nor an op of zerofx"
        text, *fields = (spec.write or write_plainly)(self, node)
        self._row(text, *fields)
        is_read = spec.write is not write_unpacked or len(node.users) == len(value(node))
        self._drop(node, also=() if is_read else ("_",))

    def _drop(
        self, *nodes: fx.Node, but: Collection[fx.Node] = (), also: Collection[str] = ()
    ) -> None:
        """Write the `del` of values that nothing reads any more, and of the names `also`."""
        last = [n for node in nodes for n in self.last.get(node, [])]
        gone = [self.names.bind(n) for n in last if n not in but]
        gone += also
        if gone:
            self._row(f"del {wrap_tuple(gone).removesuffix(',')}")

    def _return(self) -> None:
        groups: dict[Role, list[str]] = {}
        for spec, node in zip(
            self.program.outputs[self.name], self.program.results(self.name), strict=True
        ):
            text = self.buffer(node) if isinstance(node, fx.Node) else repr(node)
            groups.setdefault(spec.role, []).append(text)
        if self.pause is not None:
            return
        if self.name == BACKWARD:
            self._row(f"return [{', '.join(groups.get(Role.INPUT_GRAD, []))}]")
            return
        outs = ", ".join(groups.get(Role.OUTPUT, []))
        updates = ", ".join(groups.get(Role.BUFFER_UPDATE, []) + groups.get(Role.INPUT_UPDATE, []))
        kept = [*groups.get(Role.SAVED, []), *self._crossing_sizes()]
        saved = wrap_list(kept, len(outs) + len(updates) + 20)
        self._row(f"return [{outs}], [{updates}], {saved}")


def write_plainly(w: Function, node: fx.Node) -> tuple[str, ...]:
    """Write an op by its schema: tensors by position, everything else by name."""
    given = [*argument_pairs(node)]
    texts = [
        w.buffer(a) if isinstance(a, fx.Node) else f"{k}={literal(a, w.names.of)}" for k, a in given
    ]
    call = f"rt.{w.method(node)}({', '.join(texts)})"
    made = f"{w.bind(node)} = " if value(node) is not None else ""
    return f"{made}{call}", info(node).unit, describe_node(node) if made else ""


def write_unpacked(w: Function, node: fx.Node) -> tuple[str, ...]:
    """Write an op with several results; `_` receives those that nothing reads.

    Tensors are given by position, and by name after the first constant, which is named.
    """
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    gives = [w.bind(items[k]) if k in items else "_" for k in range(len(value(node)))]
    texts: list[str] = []
    is_named = False
    for name, a in argument_pairs(node):
        is_named = is_named or not isinstance(a, fx.Node)
        text = w.buffer(a) if isinstance(a, fx.Node) else literal(a, w.names.of)
        texts.append(f"{name}={text}" if is_named else text)
    made = f"rt.{w.method(node)}({', '.join(texts)})"
    return f"{wrap_tuple(gives, 0)} = {made}", info(node).unit


def _is_unpacked(node: fx.Node) -> bool:
    """Return whether a node is one of several results that have a name each."""
    if node.target is not operator.getitem:
        return False
    spec = spec_of(node.all_input_nodes[0])
    return spec is not None and spec.write is write_unpacked


def argument_pairs(node: fx.Node) -> list[tuple[str, Any]]:
    """Return (name, argument) for the arguments of a node's op."""
    named = zip(argument_names(node.target), node.args, strict=False)
    return [*named, *node.kwargs.items()]
