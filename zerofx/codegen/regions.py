"""Regions as source: the compute between two schedule points, one file per structure."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx.codegen.kernels import KernelCall, kernel_call
from zerofx.codegen.text import (
    RESERVED,
    attributes,
    callee,
    identifier,
    literal,
    namespace,
    with_origin,
    wrap_tuple,
)
from zerofx.compat.graphs import schema_of
from zerofx.compat.operators import in_place
from zerofx.ir.graphs import is_fused, overwrites, regions
from zerofx.ir.meta import Phase, info, value
from zerofx.ir.sizes import describe_node, form, names_in
from zerofx.ir.spec import Kind, kind_of


@dataclass(frozen=True)
class RegionCode:
    """One unique region: its function's name and body, and the unit in which it occurs first."""

    name: str
    source: str
    key: str
    unit: str = ""


@dataclass(frozen=True)
class RegionCall:
    """One call of a region: the values that it reads and computes, in the callee's order.

    kernel: the kernel that runs instead if the region is one fused node with its unpacking.
    sizes: names of the sizes that it takes after its inputs.
    """

    code: RegionCode
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    kernel: KernelCall | None = None
    sizes: tuple[str, ...] = ()


@dataclass
class RegionLibrary:
    """The regions of all graphs of a program, with equal structures once.

    hints: sizes that vary -> the values for which regions are compiled.
    kernels: the kernels that fused nodes call, by name.
    """

    hints: Mapping[str, int] = field(default_factory=dict)
    codes: dict[str, RegionCode] = field(default_factory=dict)
    kernels: dict[str, KernelCall] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def calls(self, graph: fx.Graph) -> dict[fx.Node, RegionCall]:
        """Return each region's call, keyed by the region's first node."""
        return {nodes[0]: self._call(nodes) for nodes in regions(graph).values()}

    def _call(self, nodes: list[fx.Node]) -> RegionCall:
        inside = set(nodes)
        read = (a for n in nodes for a in n.all_input_nodes)
        inputs = tuple(dict.fromkeys(a for a in read if a not in inside))
        outputs = tuple(
            n
            for n in nodes
            if any(u not in inside for u in n.users) and isinstance(value(n), torch.Tensor)
        )
        body = _Body(nodes, inputs, outputs, self.hints)
        if is_fused(nodes[0]):
            kernel = _kernel(nodes[0])
            self.kernels.setdefault(kernel.name, kernel)
            code = RegionCode(
                f"kernels.{kernel.function}", body.source(kernel.function), kernel.name
            )
            return RegionCall(code, inputs, outputs, tuple(nodes), kernel)
        key = hashlib.sha256(body.canonical().encode()).hexdigest()[:16]
        if key not in self.codes:
            name = self._name(nodes)
            self.codes[key] = RegionCode(name, body.source(name), key, body.unit)
        return RegionCall(self.codes[key], inputs, outputs, tuple(nodes), sizes=body.sizes)

    def _name(self, nodes: list[fx.Node]) -> str:
        unit = next((info(n).unit for n in nodes if info(n).unit), "root")
        base = re.sub(r"(_\d+)+(?=_|$)", "", identifier(unit)) or "root"
        phase = "backward" if info(nodes[0]).phase is Phase.BACKWARD else "forward"
        name, k = f"{base}_{phase}", 1
        while name.casefold() in self.names:  # also a file name, and some file systems ignore case
            k += 1
            name = f"{base}_{phase}_{k}"
        self.names.add(name.casefold())
        return name


def _kernel(node: fx.Node) -> KernelCall:
    values = [value(a) if isinstance(a, fx.Node) else a for a in node.args]
    return kernel_call(node.target, *values)


class _Body:
    """The writer of one region's function, with names that do not depend on the layer."""

    def __init__(
        self,
        nodes: list[fx.Node],
        inputs: Iterable[fx.Node],
        outputs: Iterable[fx.Node],
        hints: Mapping[str, int],
    ) -> None:
        self.nodes, self.inputs, self.outputs = nodes, list(inputs), list(outputs)
        self.names: dict[fx.Node, str] = {}
        self.sizes = self._sizes()
        self.hints = {name: hints[name] for name in self.sizes if name in hints}
        spaces = map(namespace, self._namespaces())
        self.taken: set[str] = {*RESERVED, *spaces, *self.sizes}
        self.unit = next((info(n).unit for n in nodes if info(n).unit), "")
        for i, node in enumerate(self.inputs):
            is_param = kind_of(node) is Kind.VIEW
            self._bind(node, self._relative(info(node).name) if is_param else f"x{i}")
        for node in nodes:
            self._bind(node, self._base(node))
        self.dying, self.overwrites = self._last_uses(), overwrites(nodes)

    def _relative(self, name: str) -> str:
        name = re.sub(r"\[\d+:\d+\]$", "", name)  # drop the row range: a layer's tiles are alike
        inner = name.removeprefix(self.unit + ".") if self.unit else name
        return (
            re.sub(r"\d+", "", identifier(inner))
            if inner == name and "." in name
            else (identifier(inner))
        )

    def _base(self, node: fx.Node) -> str:
        target = node.target
        if target is operator.getitem:
            return f"{self.names[node.args[0]]}_{node.args[1]}"  # type: ignore[index]
        schema = schema_of(target)
        return schema.name.split("::")[1].strip("_") if schema else target.__name__  # type: ignore[union-attr]

    def _bind(self, node: fx.Node, base: str) -> None:
        base = identifier(base)
        name, k = base, 0
        while name in self.taken:
            k += 1
            name = f"{base}_{k}"
        self.taken.add(name)
        self.names[node] = name

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Return, per node, the values that nothing in the region reads after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            last.setdefault(node, node)
            for read in node.all_input_nodes:
                last[read] = node
        keep = set(self.outputs)
        dying: dict[fx.Node, list[fx.Node]] = {}
        for read, node in last.items():
            if read not in keep:
                dying.setdefault(node, []).append(read)
        return dying

    def lines(self) -> list[tuple[str, str]]:
        """Return (statement, the same with its comment) for each line of the body."""
        found = []
        for node in self.nodes:
            args = [literal(a, self.names) for a in node.args]
            target: Any = node.target
            if (over := self.overwrites.get(node)) is not None:
                target = in_place(target)
                args.insert(0, args.pop(over))
            args += [f"{k}={literal(v, self.names)}" for k, v in node.kwargs.items()]
            if node.target is operator.getitem:
                call = f"{args[0]}[{args[1]}]"
            else:
                call = f"{callee(target)}({', '.join(args)})"
            where = info(node)
            module = where.module.removeprefix(self.unit).strip(".")
            statement = f"{self.names[node]} = {call}"
            kind = describe_node(node)
            found.append((statement, with_origin(statement, kind, module, where.line)))
            if gone := self.dying.get(node):
                statement = f"del {', '.join(self.names[g] for g in gone)}"
                found.append((statement, statement))
        return found

    def _namespaces(self) -> list[str]:
        schemas = [schema_of(n.target) for n in self.nodes]
        return sorted({"aten"} | {s.name.split("::")[0] for s in schemas if s is not None})

    def _sizes(self) -> tuple[str, ...]:
        """Return the names of the sizes on which the region's calls and forms depend."""
        read = [(n.args, n.kwargs) for n in self.nodes]
        forms = [form(n) for n in (*self.inputs, *self.outputs)]
        return tuple(sorted(names_in(read) | names_in(forms)))

    def specs(self) -> list[tuple]:
        return [_spec(n) for n in self.inputs]

    def strides(self) -> list[tuple[int, ...]]:
        """Return the strides that the rest of the program expects of each result."""
        return [form(n)[1] for n in self.outputs]

    def canonical(self) -> str:
        outs = [self.names[n] for n in self.outputs]
        takes = self._takes()
        return repr((takes, self.specs(), [s for s, _ in self.lines()], outs, self.strides()))

    def _takes(self) -> list[str]:
        return [*(self.names[n] for n in self.inputs), *self.sizes]

    def _table(self, name: str, what: str, entries: list) -> list[str]:
        """Write a tuple with a comment; if sizes vary, write a function that returns it."""
        if not self.sizes:
            return [f"# {what}", f"{name} = (", *(f"    {entry!r}," for entry in entries), ")"]
        head = [f"def {name}({', '.join(self.sizes)}):  # {what}", "    return ("]
        return ["", *head, *(f"        {entry!r}," for entry in entries), "    )", ""]

    def source(self, name: str) -> str:
        """Return the region file's text."""
        phase = "backward" if info(self.nodes[0]).phase is Phase.BACKWARD else "forward"
        rows = [f'"""Region {name}: {phase} compute of {len(self.nodes)} nodes, in ATen form."""']
        rows += ["", "import operator", "", "import torch", ""]
        spaces = self._namespaces()
        rows += [f"{namespace(s)} = {attributes('torch.ops', s)}" for s in spaces] + [""]
        form_of = "dtype, shape, strides and device type of each"
        said = f"{form_of} {'tensor in' if self.sizes else 'element of'} `args`"
        if self.hints:
            rows.append(f"SIZES = {self.hints!r}  # and for which values of them it is compiled")
        rows += self._table("INPUTS", said, self.specs())
        rows += self._table("OUTPUTS", "strides of each result", self.strides())
        rows += ["" if self.sizes else "\n", f"def {name}(args):"]
        if takes := self._takes():
            rows.append(_indented(f"{wrap_tuple(takes, 12)} = args"))
        rows.append("    args.clear()")
        rows += [f"    {row}" for _, row in self.lines()]
        outs = [self.names[n] for n in self.outputs]
        rows.append(_indented(f"return {wrap_tuple(outs, 12) if outs else '()'}"))
        rows.append("")
        if not any("operator." in s for s, _ in self.lines()):
            rows.remove("import operator")
            rows.remove("")
        if self.sizes and any("math." in row for row in rows):
            rows[2:2] = ["import math", ""]
        return "\n".join(rows)


def _indented(text: str) -> str:
    return "\n".join(f"    {row}" for row in text.split("\n"))


def _spec(node: fx.Node) -> tuple:
    val = value(node)
    assert isinstance(val, torch.Tensor), f"a region input is {val!r}, not a tensor"
    dtype = str(val.dtype).removeprefix("torch.")
    return dtype, *form(node), val.device.type
