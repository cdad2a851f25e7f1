"""Lifetimes: when each storage of a training step is allocated and freed.

A storage lives from the node that creates it to the last node that reads it or a view of it.
Emitted code drops every variable at its last use. This includes regions, whose callers keep no
reference to the arguments that they pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.analysis.memory.micro import Micro
from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import (
    Category,
    Compiled,
    CompiledRegion,
    Lifetimes,
    Storage,
)
from zerofx.analysis.memory.workspace import convolution_bytes, workspace_bytes
from zerofx.compat.wrapper import Moment
from zerofx.ir.graphs import overwrites, regions
from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.program import BACKWARD, Planned

# -- The peak inside a compiled region: its inputs, results and temporaries that exist together ----
# A region is one step of the walk, but not one moment: it frees inputs before it allocates its last
# results. Relative to the moment of its peak, an input that is already freed ends one time
# earlier, and a result that is not yet allocated begins one time later.


_TARGETS = {
    "convolution": torch.ops.aten.convolution.default,
    "convolution_backward": torch.ops.aten.convolution_backward.default,
}


@dataclass
class CompiledCall:
    """One call of a compiled region at `time`; given: the storages of each input."""

    region: CompiledRegion
    time: int
    given: list[tuple[Storage, ...]]
    made: dict[int, Storage] = field(default_factory=dict)  # allocation -> a result's storage

    def result(self, made: int, name: str) -> Storage:
        """Return the storage of a result that is in allocation `made`."""
        if made not in self.made:
            size, where = self.region.trace.size_bytes[made], info(self.region.nodes[0])
            kind = Category.TEMPORARIES
            self.made[made] = Storage(kind, size, name, self.time, self.time, where)
        return self.made[made]

    def settle(self) -> Storage:
        """Move the ends of inputs and results around the peak; return the memory besides these."""
        freed = self._freed()
        trace = self.region.trace
        peak = max(
            trace.moments,
            key=lambda m: trace.made_bytes(m) + _held(freed, m) + self._inside_bytes(m),
        )
        for storage, positions in freed.items():
            if not positions & peak.inputs:
                storage.death = self.time - 1
        for made, storage in self.made.items():
            if made not in peak.made:
                storage.birth = self.time + 1
                storage.death = max(storage.death, storage.birth)
        inside = sum(trace.size_bytes[m] for m in peak.made if m not in self.made)
        inside += self._inside_bytes(peak)
        where = info(self.region.nodes[0])
        name = "inside a compiled region"
        return Storage(Category.TEMPORARIES, inside, name, self.time, self.time, where)

    def _inside_bytes(self, moment: Moment) -> int:
        """Return the bytes that the operator running at a moment allocates internally."""
        if moment.inside is None:
            return 0
        alike = [n for n in self.region.nodes if n.target is _TARGETS[moment.inside.kind]]
        if len(alike) <= moment.inside.number:  # the compiler has replaced them by others
            return 0
        is_channels_last = moment.inside in self.region.trace.channels_last
        return convolution_bytes(alike[moment.inside.number], is_channels_last)

    def _freed(self) -> dict[Storage, set[int]]:
        """Return the storages that are unused after this call, with the inputs in each."""
        found: dict[Storage, set[int]] = {}
        for position, storages in enumerate(self.given):
            for storage in storages:
                if storage.death == self.time and storage.slot < 0:
                    found.setdefault(storage, set()).add(position)
        return found


def _held(freed: dict[Storage, set[int]], moment: Moment) -> int:
    return sum(s.nbytes for s, positions in freed.items() if positions & moment.inputs)


# -- When each storage of a training step is allocated and freed, from forward through backward ----


def lifetimes(
    program: Planned,
    compiled: Compiled | None = None,
    keeps_results: bool = True,
    micro: Micro | None = None,
) -> Lifetimes:
    """Return the live range of every storage that the program's graphs create or receive.

    Regions are assumed to run op by op in ATen, except those in `compiled`. The user holds the loss
    to the end of the step, and the other results too if `keeps_results`. micro: the micro-batch of
    the step, None for the only one. It decides whether gradients are packed into p.grad's own
    memory, and whether they are reduced.
    """
    walk = _Walk(program, compiled or {}, keeps_results, micro or Micro())
    for name in sorted(program.graphs, key=lambda n: n == BACKWARD):
        walk.run(name)
    walk.settle()
    return Lifetimes(tuple(walk.places.storages), tuple(walk.nodes))


class _Walk:
    """The walk through the graphs, with the storages of each node's value."""

    def __init__(
        self, program: Planned, compiled: Compiled, keeps_results: bool, micro: Micro
    ) -> None:
        self.program, self.places = program, Places(program, micro)
        self.compiled, self.keeps_results = compiled, keeps_results
        self.nodes: list[tuple[str, fx.Node]] = []
        self.calls: list[CompiledCall] = []

    def run(self, graph: str) -> None:
        self.places.graph = graph
        self.places.held = {}
        self.places.start = len(self.nodes)
        self.places.overwritten = {}
        for nodes in regions(self.program.graph(graph)).values():
            self.places.overwritten |= overwrites(nodes)
        nodes = list(self.program.graph(graph).nodes)
        self.nodes += [(graph, n) for n in nodes]
        done: set[fx.Node] = set()
        for time, node in enumerate(nodes, self.places.start):
            if node in done:
                continue
            region = self.compiled.get(node)
            for read in region.inputs if region else node.all_input_nodes:
                for storage in self.places.held[read]:
                    if storage.death < time:
                        storage.death = time
            if region:
                self._run_compiled(region, time)
                done.update(region.nodes)
            elif node.op == "output":
                self._leave(time)
            else:
                self.places.held[node] = self.places.hold(node, time)
                if inside := workspace_bytes(node):
                    self._briefly(inside, f"inside {node.name}", node, time)
        for storage in self.places.forever:
            storage.death = len(self.nodes) - 1

    def settle(self) -> None:
        """Place the internal memory of compiled regions, once the inputs they free are known."""
        for call in self.calls:
            self.places.storages.append(call.settle())

    def _run_compiled(self, region: CompiledRegion, time: int) -> None:
        """Treat a region as one step, and record the storages it creates."""
        call = CompiledCall(region, time, [self.places.held[n] for n in region.inputs])
        for node, output in zip(region.outputs, region.trace.outputs, strict=True):
            if output.made < 0:
                self.places.held[node] = self.places.held[region.inputs[output.input]]
                continue
            storage = call.result(output.made, node.name)
            storage.where, storage.category = info(node), self.places.category(node)
            self.places.held[node] = (storage,)
        self.places.storages += call.made.values()
        self.calls.append(call)

    def _briefly(self, nbytes: int, name: str, node: fx.Node, time: int) -> None:
        """Record memory that is held at one time only."""
        kind = Category.TEMPORARIES
        self.places.storages.append(Storage(kind, nbytes, name, time, time, info(node)))

    # -- results of the graph -------------------------------------------------------------------
    def _leave(self, time: int) -> None:
        specs = self.program.outputs[self.places.graph]
        for spec, node in zip(specs, self.program.results(self.places.graph), strict=True):
            if not isinstance(node, fx.Node):
                continue
            held = self.places.held[node]
            if spec.role is Role.SAVED:
                self.places.saved[spec.index] = held
            for storage in held:
                self._hand_out(storage, spec)

    def _hand_out(self, storage: Storage, spec: OutputInfo) -> None:
        """Set the category of a result's storage; results for the user are held to the end."""
        is_new = storage.category is Category.TEMPORARIES
        if is_new and spec.role in _LEAVES:
            storage.category = _LEAVES[spec.role]
        stage = self.program.stage
        is_sent = stage.size > 1 and spec.index >= stage.num_outputs  # to another pipeline stage
        is_dropped = is_sent or self.program.joins_results
        is_kept = spec.index == self.program.calling.loss or (self.keeps_results and not is_dropped)
        if spec.role in (Role.GRAD, Role.INPUT_GRAD) or (spec.role is Role.OUTPUT and is_kept):
            self.places.forever.append(storage)
            if is_new and spec.name:
                storage.name = spec.name


_LEAVES = {
    Role.SAVED: Category.ACTIVATIONS,
    Role.OUTPUT: Category.OUTPUTS,
    Role.GRAD: Category.GRADIENTS,
    Role.INPUT_GRAD: Category.GRADIENTS,
}
