"""Dumps: a program as text with one node per line, fixed columns, identical layers once.

    def forward(
        shard_0,                                      # f32[64]     shard fc0
    ):
        gather_0 = zfx.all_gather(shard_0, bucket=0)  # f32[256]    gather fc0  +1.0 KiB   1 ahead
        mm = aten.mm(x, fc0_weight)                   # f32[8, 16]  fc0         +512 B     m.py:12
        zfx.release(full_0)                           #             fc0         -1.0 KiB

The text is the same in every run: it contains no addresses and no times. The `level` sets the
detail: summary (the header line), units, regions, nodes (identical layers once), full (every node).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import OpOverload, argument_names, op_name
from zerofx.errors import PlanError
from zerofx.ir.graphs import alias_source, is_alias, is_glue
from zerofx.ir.meta import Info, info, nbytes, value
from zerofx.ir.names import name_nodes
from zerofx.ir.program import Entry, Planned, Program
from zerofx.ir.repeats import Layers, Row, collapse, spans
from zerofx.ir.sizes import describe_node
from zerofx.ir.spec import Kind, kind_of, launch_of, spec_of
from zerofx.ir.text import as_text, describe, printable, short_dtype, without_numbers
from zerofx.plan.sizes import format_bytes

# -- The nodes of a graph as rows of text, each with a key that identical layers share -------------


STATEMENT, TYPE, PLACE, DELTA = 72, 20, 24, 10  # widths of the columns
_HIDDEN = {"numel", "shape", "name"}  # arguments of zerofx ops that the row shows elsewhere
_ABSENT = "none"
_VOLATILE = {"bucket", "slot", "offset", "offsets"}  # may differ between identical layers


class Writer:
    """Writer of one graph's lines."""

    def __init__(self, program: Program, graph: str) -> None:
        self.program, self.graph = program, graph
        self.nodes = [n for n in program.graph(graph).nodes if n.op != "output"]
        self.names = name_nodes(program.graph(graph))
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.ahead = _ahead(self.nodes)
        self.ordinal = self._ordinals()

    def _ordinals(self) -> dict[fx.Node, Hashable]:
        """Return each placeholder's identity within its layer, which is the same in every layer."""
        count: dict[Hashable, int] = {}
        found: dict[fx.Node, Hashable] = {}
        for node in self.nodes:
            where = info(node)
            if node.op == "placeholder":
                what = (where.role, without_numbers(where.name or node.name))
                k = count[where.unit, what] = count.get((where.unit, what), 0) + 1
                found[node] = (what, without_numbers(where.unit), k)
        return found

    # -- frame ----------------------------------------------------------------------------------
    def frame(self, fold: Callable[[Sequence[Row]], list[str]]) -> list[str]:
        """Return the function's lines: placeholders, body and results, each folded separately."""
        rows = [self._row(n) for n in self.nodes]
        num = sum(n.op == "placeholder" for n in self.nodes)
        lines = [f"def {self.graph}(", *fold(rows[:num]), "):"]
        lines += [*fold(rows[num:]), "    return (", *fold(self._results()), "    )"]
        return lines

    def _row(self, node: fx.Node) -> Row:
        where = info(node)
        return Row(
            label=where.unit,
            key=self._key(node, where),
            write=lambda layers, node=node: self._line(node, spans(layers)),  # type: ignore[misc]
            volatile=_volatile(node),
            is_main=spec_of(node) is None,
        )

    def _results(self) -> list[Row]:
        rows = []
        specs = self.program.outputs[self.graph]
        for spec, node in zip(specs, self.program.results(self.graph), strict=True):
            is_node = isinstance(node, fx.Node)
            unit = info(node).unit if is_node else ""
            text = f"        {self.names[node] if is_node else node},"
            note = f"{spec.role.value} {spec.name}".strip()
            kind = describe_node(node) if is_node else ""
            line = f"{text:<{STATEMENT}} # {kind:<{TYPE}} {note}".rstrip()
            key = (spec.role, without_numbers(spec.name), kind, without_numbers(unit))
            rows.append(Row(unit, key, lambda _, line=line: line))  # type: ignore[misc]
        return rows

    # -- keys -----------------------------------------------------------------------------------
    def _key(self, node: fx.Node, where: Info) -> Hashable:
        """Return the part of a line that is equal for the same line of another layer."""
        module = without_numbers(where.module or where.unit)
        kind = _kind(value(node))
        if node.op == "placeholder":
            return self.ordinal[node], kind
        if kind_of(node) is Kind.VIEW:
            return node.target, kind, module, where.name.removeprefix(where.unit)
        here = self.position[node]
        tokens = [self._token(v, here) for k, v in _arguments(node) if k not in _VOLATILE]
        extra = self.ahead.get(node)
        return node.target, kind, module, where.line, where.region is None, tuple(tokens), extra

    def _token(self, argument: Any, here: int) -> Hashable:
        if isinstance(argument, fx.Node):
            if argument.op == "placeholder":
                return self.ordinal[argument]
            if kind_of(argument) is Kind.VIEW:
                where = info(argument)
                return where.name.removeprefix(where.unit), without_numbers(where.unit)
            is_shared = len({info(u).unit for u in argument.users}) > 3
            return argument.name if is_shared else here - self.position[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(self._token(a, here) for a in argument)
        return argument if isinstance(argument, (int, float, str, bool)) else str(argument)

    # -- text -----------------------------------------------------------------------------------
    def line(self, node: fx.Node) -> str:
        """Return the line of one node."""
        return self._line(node, spans([_volatile(node)]))

    def _line(self, node: fx.Node, volatile: tuple[str, ...]) -> str:
        where, val = info(node), value(node)
        name = self.names[node]
        if node.op == "placeholder":
            statement = f"    {name},"
        elif kind_of(node) in (Kind.RELEASE, Kind.FREE):
            statement = f"    {self._call(node, volatile)}"
        else:
            statement = f"    {name} = {self._call(node, volatile)}"
        kind = _type(val)
        columns = f"{kind:<{TYPE}} {self._place(node, where):<{PLACE}} {_delta(node):<{DELTA}}"
        line = f"{statement:<{STATEMENT}} # {columns} {where.line}".rstrip()
        ahead = self.ahead.get(node)
        return f"{line}  {ahead} ahead" if ahead else line

    def _call(self, node: fx.Node, volatile: tuple[str, ...]) -> str:
        shown = iter(volatile)
        parts = []
        for key, argument in _arguments(node):
            if key in _VOLATILE and spec_of(node) is not None:
                said = next(shown)
                parts += [f"{key}={said}"] if said != _ABSENT else []
            elif key and not isinstance(argument, (fx.Node, list, tuple)):
                parts.append(f"{key}={self._write(argument)}")
            else:
                parts.append(self._write(argument))
        if node.target is operator.getitem:
            return f"{parts[0]}[{parts[1]}]"
        return (
            f"{callee(node.target)}({', '.join(parts)})"
            if node.op != "get_attr"
            else str(node.target)
        )

    def _write(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self.names[argument]
        if isinstance(argument, (list, tuple)):
            inner = ", ".join(map(self._write, argument))
            return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
        if isinstance(argument, torch.dtype):
            return short_dtype(argument)
        return repr(argument) if isinstance(argument, str) else str(argument)

    def _place(self, node: fx.Node, where: Info) -> str:
        role = where.role
        if node.op == "placeholder" and role is not None:
            return f"{role.value} {where.unit}".strip()
        spec = spec_of(node)
        if spec is not None and spec.place:
            return f"{spec.place} {where.unit}"
        return where.module or where.unit


def callee(target: Any) -> str:
    """Write an op as in dumps: `aten.mm`, `aten.add.Tensor`, `zfx.wait`."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", str(target))
    space, name, overload = op_name(target)
    parts = ["zfx" if space == "zerofx" else space, name]
    return ".".join(parts if overload == "default" else [*parts, overload])


def _arguments(node: fx.Node) -> list[tuple[str, Any]]:
    """Return (keyword or "", argument) of a call; zerofx ops show their constants by name.

    An omitted slot is included as well: the same line of another layer may have one.
    """
    found: list[tuple[str, Any]] = [("", a) for a in node.args]
    if spec_of(node) is not None:
        names = argument_names(node.target)
        found = [(k, a) for k, a in zip(names, node.args, strict=False) if k not in _HIDDEN]
        found += [(k, _ABSENT) for k in names[len(node.args) :] if k in _VOLATILE]
    return [*found, *node.kwargs.items()]


def _type(val: Any) -> str:
    """Describe a value; for several tensors, only give their number."""
    if isinstance(val, (tuple, list)) and len(val) > 1:
        return f"{len(val)} values"
    return "" if val is None else describe(val)


def _volatile(node: fx.Node) -> tuple[Any, ...]:
    if spec_of(node) is None:
        return ()
    return tuple(v for k, v in _arguments(node) if k in _VOLATILE)


def _kind(val: Any) -> Hashable:
    if isinstance(val, torch.Tensor):
        return val.dtype, val.shape
    if isinstance(val, (tuple, list)):
        return tuple(map(_kind, val))
    return str(val)


def _delta(node: fx.Node) -> str:
    """Return the bytes that a node allocates or frees, or "" for views."""
    spec = spec_of(node)
    if spec is not None:
        taken, given = spec.adds(node), spec.frees(node)
        if given:
            return f"-{format_bytes(given)}"
        return f"+{format_bytes(taken)}" if taken else ""
    if node.op != "call_function" or node.target is operator.getitem or is_alias(node):
        return ""
    size = nbytes(value(node))
    return f"+{format_bytes(size)}" if size else ""


def _ahead(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return, for each gather launched before its turn, the number of other waits in between."""
    waits: dict[fx.Node, int] = {}
    found: dict[fx.Node, int] = {}
    for node in nodes:
        spec = spec_of(node)
        if spec is not None and spec.is_gather:
            waits[node] = len(found)
        elif kind_of(node) is Kind.WAIT and (launch := launch_of(node)) in waits:
            found[launch] = len(found) - waits[launch]
    return {node: k for node, k in found.items() if k}


# -- A graph in fewer lines: one per region, or one per unit ---------------------------------------


@dataclass
class Group:
    """Adjacent nodes that share one line."""

    label: str
    region: int | None
    nodes: list[fx.Node] = field(default_factory=list)

    def made_bytes(self) -> int:
        """Return the bytes of new storages that outlive the group, with views at their own size."""
        inside = set(self.nodes)
        leaving = (n for n in self.nodes if any(u not in inside for u in n.users))
        sources = dict.fromkeys(alias_source(n) for n in leaving)
        tensors = (value(n) for n in sources if n in inside)
        return sum(nbytes(v) for v in tensors if isinstance(v, torch.Tensor))


def region_lines(program: Program, graph: str) -> list[str]:
    """Return one line per region and one per launch, wait or release."""
    names = name_nodes(program.graph(graph))
    rows = [
        _region_row(group) if group.region is not None else _communication_row(group, names)
        for group in _groups(program, graph)
    ]
    return [f"def {graph}:", *collapse(rows)]


def unit_lines(program: Program, graph: str) -> list[str]:
    """Return one line per unit, in order of computation; `made` outlives the unit's regions."""
    by_unit: dict[str, list[Group]] = {}
    sent: dict[str, list[str]] = {}
    for group in _groups(program, graph):
        if group.region is not None:
            by_unit.setdefault(group.label, []).append(group)
        elif kind_of(group.nodes[0]) is Kind.LAUNCH:
            sent.setdefault(group.label, []).append(callee(group.nodes[0].target)[4:])
    rows = []
    for unit in dict.fromkeys([*by_unit, *sent]):
        groups, kinds = by_unit.get(unit, []), sent.get(unit, [])
        made = format_bytes(sum(g.made_bytes() for g in groups))
        num = sum(len(g.nodes) for g in groups)
        notes = f"{num:5d} nodes   {len(groups)} regions   made {made:<12}"
        notes += "".join(f"{kinds.count(k)} {k}   " for k in dict.fromkeys(kinds))
        line = f"    {unit or '(root)':<28}{notes}".rstrip()
        row = Row(unit, (without_numbers(unit), notes), lambda _, line=line: line)  # type: ignore[misc]
        rows.append(row)
    return [f"def {graph}:", *collapse(rows)]


def _groups(program: Program, graph: str) -> list[Group]:
    found: list[Group] = []
    for node in program.graph(graph).nodes:
        if node.op in ("placeholder", "output", "get_attr") or is_glue(node):
            continue
        where = info(node)
        if (spec := spec_of(node)) is not None:
            if not spec.is_quiet:
                found.append(Group(where.unit, None, [node]))
            continue
        region = -1 if where.region is None else where.region
        if not found or found[-1].region != region:
            found.append(Group("", region))
        found[-1].nodes.append(node)
        found[-1].label = found[-1].label or where.unit
    return found


def _region_row(group: Group) -> Row:
    ops_shown = [callee(n.target).removeprefix("aten.") for n in group.nodes if not is_alias(n)]
    heaviest = next((o for o in ops_shown if "mm" in o or "conv" in o or "attention" in o), "")
    made = f"+{format_bytes(group.made_bytes())}"
    key: Hashable = (without_numbers(group.label), tuple(ops_shown), made)

    def write(layers: Layers) -> str:
        number = "region" if group.region == -1 else f"region {spans(layers)[0]}"
        notes = f"{len(group.nodes):4d} nodes  {made:<12} {heaviest}"
        return f"    {number:<18} {group.label or '(root)':<32} {notes}".rstrip()

    return Row(group.label, key, write, (group.region,))


def _communication_row(group: Group, names: dict[fx.Node, str]) -> Row:
    (node,) = group.nodes
    name = callee(node.target).removeprefix("zfx.")
    kind = describe_node(node) if isinstance(value(node), torch.Tensor) else ""
    key = (node.target, without_numbers(group.label), kind)

    kind_of_op = kind_of(node)
    spec = spec_of(launch_of(node) if kind_of_op is Kind.WAIT else node)
    of = "v" if spec is not None and spec.is_value else "b"

    def write(layers: Layers) -> str:
        is_numbered = info(node).index >= 0 if of == "v" else kind_of_op is not Kind.SYNC
        what = f"{name} {of}{spans(layers)[0]}" if is_numbered else name
        return f"    {what:<18} {group.label:<32} {kind}".rstrip()

    return Row(group.label, key, write, (info(node).index,), is_main=False)


# -- A program as text: one node per line, fixed columns, identical layers once --------------------


LEVELS = ("summary", "units", "regions", "nodes", "full")


def dump_program(program: Program, title: str = "", level: str = "nodes") -> str:
    """Return the program's text under a header line.

    title: the header; by default that of the last pass, from the history.

    Raises:
        PlanError: the level is unknown.
    """
    history = program.history if isinstance(program, Planned) else []
    last = history[-1].header if history else ""
    title = printable(title or last or program.model_name)
    body = dump_body(program, level)
    return f"# {title}\n\n{body}" if body else f"# {title}"


def dump_body(program: Program, level: str = "nodes") -> str:
    """Return the program's text without the header."""
    if check_level(level) == "summary":
        return ""
    return "\n\n".join(as_text(dump_graph(program, name, level)) for name in program.graphs)


def check_level(level: str) -> str:
    if level not in LEVELS:
        raise PlanError(f"dump level {level!r} is unknown. Use one of {', '.join(LEVELS)}.")
    return level


def dump_graph(program: Program, graph: str, level: str = "nodes") -> list[str]:
    """Return the lines of one of the program's graphs."""
    if level == "units":
        return unit_lines(program, graph)
    if level == "regions":
        return region_lines(program, graph)
    writer = Writer(program, graph)
    return writer.frame(lambda rows: collapse(rows, is_on=level != "full"))


def fault(program: Program, graph: str, node: fx.Node, around: int = 10) -> str:
    """Return the lines around a node with the node marked, as verification errors show them."""
    writer = Writer(program, graph)
    at = writer.nodes.index(node)
    first, last = max(0, at - around), min(len(writer.nodes), at + around + 1)
    shown = [writer.line(n) for n in writer.nodes[first:last]]
    marks = ["> " if i == at else "  " for i in range(first, last)]
    lines = [mark + line[2:] for mark, line in zip(marks, shown, strict=True)]
    return as_text([f"in {graph}:", *lines])


def header(program: Planned, entry: Entry, comm_bytes: int, peak_bytes: int) -> str:
    """Return an entry's first line: its number, pass, setting, and the pass's changes.

    The program's history contains the previous entries.
    """
    before = program.history[-1] if program.history else None
    parts = [f"{len(program.history):02d} {entry.pass_spec}"]
    if program.is_laid_out:
        where = f"world={program.world_size} on {program.hardware.name}"
        parts.append(f"stage={program.plan.stage} {where}")
    num_before = before.num_nodes if before else entry.num_nodes
    parts.append(f"nodes {num_before} -> {entry.num_nodes}")
    parts.append(f"comm {format_bytes(comm_bytes)}")
    parts.append(f"peak {_change(before.peak_bytes if before else peak_bytes, peak_bytes)}")
    return "   ".join(parts)


def _change(before: int, after: int) -> str:
    """Return `3.0 -> 3.5 KiB`, with the unit written twice only if it differs."""
    left, right = format_bytes(before).split(), format_bytes(after).split()
    if left[1] == right[1]:
        left = left[:1]
    return f"{' '.join(left)} -> {' '.join(right)}"
