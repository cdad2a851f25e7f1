"""When each storage of a training step comes to life and dies, from forward through backward.

Time is a number over the nodes of forward, then backward, in the order in which they run. Views
count at the storage they look into, once. A storage lives from the node that makes it to the last
node that reads it or a view of it: emitted code drops every variable at its last use, also inside
regions, whose callers keep nothing of what they hand over.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from zerofx.analysis.wrapper import RegionTrace
from zerofx.ir import ops
from zerofx.ir.graphs import is_alias
from zerofx.ir.meta import Info, OutputInfo, Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Program


class Category(str, Enum):
    """What bytes are held for."""

    PARAMETERS = "parameters"  # shards; full parameters before they are sharded
    GATHERED = "gathered"  # resident and kept copies of full parameters
    GRADIENTS = "gradients"  # what p.grad shows, and full gradients on their way into a bucket
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"  # what backward reads of forward
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"  # slots, and what reductions receive into
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    BUFFERS = "buffers"


@dataclass(eq=False)
class Storage:
    """One allocation: `nbytes` held from time `birth` to time `death`, both inclusive.

    slot: the slot it lies in, whose bytes are held all the time; -1 for memory of its own.
    """

    category: Category
    nbytes: int
    name: str
    birth: int
    death: int
    where: Info
    slot: int = -1


@dataclass(frozen=True)
class Lifetimes:
    """All storages of a step, and the node that runs at each time."""

    storages: tuple[Storage, ...]
    nodes: tuple[tuple[str, fx.Node], ...]

    @property
    def end(self) -> int:
        return max(len(self.nodes) - 1, 0)


@dataclass(frozen=True)
class CompiledRegion:
    """One call of a region that Inductor compiled: what it reads and makes, and its allocations."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    trace: RegionTrace


Compiled = Mapping[fx.Node, CompiledRegion]  # by the region's first node


def lifetimes(program: Program, compiled: Compiled | None = None) -> Lifetimes:
    """Return the live range of every storage that the program's graphs make or are given.

    Regions are taken to run op by op, as ATen, but for those in `compiled`.
    """
    walk = _Walk(program, compiled or {})
    for name in sorted(program.graphs, key=lambda n: n == BACKWARD):
        walk.run(name)
    return Lifetimes(tuple(walk.storages), tuple(walk.nodes))


class _Walk:
    """Runs through the graphs once, holding which storages each node's value lies in."""

    def __init__(self, program: Program, compiled: Compiled) -> None:
        self.program, self.compiled = program, compiled
        self.storages: list[Storage] = []
        self.nodes: list[tuple[str, fx.Node]] = []
        self.given: dict[tuple, tuple[Storage, ...]] = {}  # placeholders that both graphs share
        self.saved: dict[int, tuple[Storage, ...]] = {}
        self.forever: list[Storage] = []

    def run(self, graph: str) -> None:
        self.graph = graph
        self.held: dict[fx.Node, tuple[Storage, ...]] = {}
        self.start = len(self.nodes)
        nodes = list(self.program.graph(graph).nodes)
        self.nodes += [(graph, n) for n in nodes]
        done: set[fx.Node] = set()
        for time, node in enumerate(nodes, self.start):
            if node in done:
                continue
            region = self.compiled.get(node)
            for read in region.inputs if region else node.all_input_nodes:
                for storage in self.held[read]:
                    if storage.death < time:
                        storage.death = time
            if region:
                self._run_compiled(region, time)
                done.update(region.nodes)
            elif node.op == "output":
                self._leave(time)
            else:
                self.held[node] = self._hold(node, time)
        for storage in self.forever:
            storage.death = len(self.nodes) - 1

    def _run_compiled(self, region: CompiledRegion, time: int) -> None:
        """Take a region as one step: its inputs are held until it returns."""
        trace = region.trace
        made = {
            key: Storage(Category.TEMPORARIES, nbytes, "", time, time, info(region.nodes[0]))
            for key, nbytes in trace.made_bytes.items()
        }
        for node, output in zip(region.outputs, trace.outputs, strict=True):
            if output.made < 0:
                self.held[node] = self.held[region.inputs[output.input]]
                continue
            storage = made[output.made]
            storage.name = storage.name or node.name
            storage.where, storage.category = info(node), self._category(node)
            self.held[node] = (storage,)
        self.storages += made.values()
        inside = trace.peak_bytes - sum(trace.made_bytes.values())
        where = info(region.nodes[0])
        kind, name = Category.TEMPORARIES, "inside a compiled region"
        self.storages.append(Storage(kind, max(inside, 0), name, time, time, where))

    # -- what a node's value lies in ------------------------------------------------------------
    def _hold(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._own(node, Category.BUFFERS, value(node), time, forever=True)
        target = node.target
        if target is operator.getitem:
            source = node.all_input_nodes[0]
            parts, index = self.held[source], node.args[1]
            is_taken_apart = not is_view(source) and len(parts) > 1
            return (parts[index],) if is_taken_apart else parts  # type: ignore[index]
        if target in ops.ALL and target not in _MAKES:
            return self._communication(node, time)
        if is_view(node):
            return self.held[next(a for a in node.args if isinstance(a, fx.Node))]
        val = value(node)
        if isinstance(val, (tuple, list)):
            made = [self._own(node, self._category(node), v, time) for v in val]
            return tuple(m[0] if m else self._nothing(node, time) for m in made)
        return self._own(node, self._category(node), val, time)

    def _own(
        self, node: fx.Node, category: Category, val: Any, time: int,
        slot: int = -1, forever: bool = False, name: str = "",
    ) -> tuple[Storage, ...]:  # fmt: skip
        if not isinstance(val, torch.Tensor):
            return ()
        where = info(node)
        name = name or where.name or node.name
        made = Storage(category, span_bytes(val), name, time, time, where, slot)
        self.storages.append(made)
        if forever:
            made.birth = 0
            self.forever.append(made)
        return (made,)

    def _nothing(self, node: fx.Node, time: int) -> Storage:
        return Storage(Category.TEMPORARIES, 0, node.name, time, time, info(node))

    def _placeholder(self, node: fx.Node) -> tuple[Storage, ...]:
        where = info(node)
        if where.role is Role.SAVED and where.index in self.saved:
            return self.saved[where.index]
        is_early = where.role is Role.TANGENT or self.graph == FORWARD
        key = (where.role, where.index if where.role is not Role.PARAM else -1, where.name)
        if key not in self.given:
            category = _GIVEN.get(where.role, Category.TEMPORARIES)  # type: ignore[arg-type]
            birth = self.start if is_early else 0
            is_forever = where.role is not Role.TANGENT
            self.given[key] = self._own(node, category, value(node), birth, forever=is_forever)
        return self.given[key]

    def _communication(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return what a zerofx op's result lies in: a slot, memory of its own, or its argument."""
        target = node.target
        if target is ops.all_gather or target is ops.grad_buffer:
            category = Category.GATHERED if target is ops.all_gather else Category.GRADIENTS
            slot = slot_of(node)
            name = where.unit if (where := info(node)).unit else node.name
            return self._own(node, category, value(node), time, slot, name=name)
        if target is ops.refresh or target is ops.resident or target in ops.REDUCES:
            return ()  # a resident copy, or the gradient's shard: held all the time
        if target is ops.release:
            return ()
        return self.held[next(iter(node.all_input_nodes))]

    def _category(self, node: fx.Node) -> Category:
        if any(user.target is ops.pack for user in node.users):
            return Category.GRADIENTS
        return Category.TEMPORARIES

    # -- what leaves the graph ------------------------------------------------------------------
    def _leave(self, time: int) -> None:
        specs = self.program.outputs[self.graph]
        for spec, node in zip(specs, self.program.results(self.graph), strict=True):
            if not isinstance(node, fx.Node):
                continue
            held = self.held[node]
            if spec.role is Role.SAVED:
                self.saved[spec.index] = held
            for storage in held:
                self._hand_out(storage, spec)

    def _hand_out(self, storage: Storage, spec: OutputInfo) -> None:
        """Settle what a result's storage is for; what the user gets is held to the end."""
        is_new = storage.category is Category.TEMPORARIES
        if is_new and spec.role in _LEAVES:
            storage.category = _LEAVES[spec.role]
        if spec.role in (Role.OUTPUT, Role.GRAD, Role.INPUT_GRAD):
            self.forever.append(storage)
            if is_new and spec.name:
                storage.name = spec.name


_MAKES = frozenset({ops.sync_buffers})
_GIVEN = {
    Role.PARAM: Category.PARAMETERS,
    Role.SHARD: Category.PARAMETERS,
    Role.BUFFER: Category.BUFFERS,
    Role.INPUT: Category.INPUTS,
    Role.TANGENT: Category.OUTPUTS,
    Role.SAVED: Category.ACTIVATIONS,
}
_LEAVES = {
    Role.SAVED: Category.ACTIVATIONS,
    Role.OUTPUT: Category.OUTPUTS,
    Role.GRAD: Category.GRADIENTS,
    Role.INPUT_GRAD: Category.GRADIENTS,
}


def slot_of(node: fx.Node) -> int:
    """Return the slot of a gather or gradient buffer, -1 where it has memory of its own."""
    place = 3 if node.target is ops.all_gather else 4
    return node.args[place] if len(node.args) > place else -1  # type: ignore[return-value]


def is_view(node: fx.Node) -> bool:
    """Say whether a node's value lies in the storage of its argument."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return node.op == "call_function" and _is_view_op(node)


_VIEW_OPS: dict[Any, bool] = {}


def _is_view_op(node: fx.Node) -> bool:
    known = _VIEW_OPS.get(node.target)
    if known is None:
        known = _VIEW_OPS[node.target] = is_alias(node)
    return known


def span_bytes(val: torch.Tensor) -> int:
    """Return the bytes of a fresh tensor's storage, from its shape and strides."""
    return _span_bytes(val.shape, val.stride(), val.dtype)


@lru_cache(maxsize=8192)
def _span_bytes(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> int:
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize
