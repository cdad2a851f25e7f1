"""When each storage of a training step comes to life and dies, from forward through backward.

A storage lives from the node that makes it to the last node that reads it or a view of it: emitted
code drops every variable at its last use, also inside regions, whose callers keep nothing of what
they hand over.
"""

from __future__ import annotations

from torch import fx

from zerofx.analysis.memory.inside import CompiledCall
from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import (
    Category,
    Compiled,
    CompiledRegion,
    Lifetimes,
    Storage,
)
from zerofx.analysis.memory.workspace import workspace_bytes
from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.program import BACKWARD, Planned


def lifetimes(
    program: Planned,
    compiled: Compiled | None = None,
    keeps_results: bool = True,
    packs_apart: bool = False,
) -> Lifetimes:
    """Return the live range of every storage that the program's graphs make or are given.

    Regions are taken to run op by op, as ATen, but for those in `compiled`. The user holds the loss
    to the end, and the other results too if `keeps_results`. Gradients that are else packed into
    p.grad's own memory are not if `packs_apart`: there others stand, to which they are added.
    """
    walk = _Walk(program, compiled or {}, keeps_results, packs_apart)
    for name in sorted(program.graphs, key=lambda n: n == BACKWARD):
        walk.run(name)
    walk.settle()
    return Lifetimes(tuple(walk.places.storages), tuple(walk.nodes))


class _Walk:
    """Runs through the graphs once, holding which storages each node's value lies in."""

    def __init__(
        self, program: Planned, compiled: Compiled, keeps_results: bool, packs_apart: bool
    ) -> None:
        self.program, self.places = program, Places(program, packs_apart)
        self.compiled, self.keeps_results = compiled, keeps_results
        self.nodes: list[tuple[str, fx.Node]] = []
        self.calls: list[CompiledCall] = []

    def run(self, graph: str) -> None:
        self.places.graph = graph
        self.places.held = {}
        self.places.start = len(self.nodes)
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
        """Place the inside of compiled regions, now that it is known which inputs they free."""
        for call in self.calls:
            self.places.storages.append(call.settle())

    def _run_compiled(self, region: CompiledRegion, time: int) -> None:
        """Take a region as one step, and note what it makes."""
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
        """Note what is held at one time only."""
        kind = Category.TEMPORARIES
        self.places.storages.append(Storage(kind, nbytes, name, time, time, info(node)))

    # -- what leaves the graph ------------------------------------------------------------------
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
        """Settle what a result's storage is for; what the user gets is held to the end."""
        is_new = storage.category is Category.TEMPORARIES
        if is_new and spec.role in _LEAVES:
            storage.category = _LEAVES[spec.role]
        is_kept = self.keeps_results or spec.index == self.program.calling.loss
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
