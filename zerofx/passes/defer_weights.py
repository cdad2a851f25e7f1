"""defer-weights: divide backward in two, so that gradients of weights can be computed later.

The first part computes the gradients of the program's inputs, for which other pipeline stages wait.
The second part computes those of the weights. What the second part reads of the first is held in
between, for each micro-batch that waits.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zerofx import ops
from zerofx.analysis.recompute.activations import is_param_alias
from zerofx.analysis.time.kernels import node_flops
from zerofx.ir.graphs import alias_source, call
from zerofx.ir.meta import Phase, Role, info, nbytes, set_info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import spec_of
from zerofx.passes.base import Fact, Pass, Report
from zerofx.plan.sizes import format_bytes


@dataclass(frozen=True)
class DeferWeights(Pass):
    """Move the nodes that only gradients of weights depend on after a pause.

    Nodes that read a parameter stay before it, with all that they depend on: parameters are then
    gathered once per backward, and none is gathered while a backward waits. Gradients of weights
    that take no product (those of norms) stay as well, if less is held with them than without.
    """

    name: ClassVar[str] = "defer-weights"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.VALUES_AWAITED, Fact.REGIONS_CUT})

    enabled: bool = False

    def run(self, program: Planned) -> Report:
        if not self.enabled or BACKWARD not in program.graphs:
            return Report(False, "backward is not divided")
        graph = program.graph(BACKWARD)
        pairs = list(zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True))
        sent = [r for s, r in pairs if s.role is Role.INPUT_GRAD and isinstance(r, fx.Node)]
        grads = [r for s, r in pairs if s.role is Role.GRAD and isinstance(r, fx.Node)]
        division = _Division(graph, sent, grads)
        division.save_memory()
        later = [n for n in division.calls if n not in division.first]
        output = graph.output_node()
        for node in later:
            output.prepend(node)
        with graph.inserting_before(later[0] if later else output):
            pause = call(graph, ops.pause, (sent,))
        set_info(pause, phase=Phase.BACKWARD)
        held = format_bytes(sum(division.bytes_of(root) for root in division.held()))
        return Report(True, f"{len(later)} nodes after the pause, over which {held} are held")


class _Division:
    """The division of a backward graph: `first` has the nodes of the first part.

    readers: by storage, given by its root, the nodes of the second part that read it, and the
    gradients made in the first part, which are read after the pause as well.
    """

    def __init__(self, graph: fx.Graph, sent: list[fx.Node], grads: list[fx.Node]) -> None:
        self.calls = [n for n in graph.nodes if n.op in ("call_function", "get_attr")]
        self._grads = {g: None for g in grads if g.op == "call_function"}
        fixed = [n for n in self.calls if n.op == "get_attr" or info(n).is_random]
        fixed += [n for n in self.calls if any(map(is_param_alias, n.all_input_nodes))]
        self.first: set[fx.Node] = set()
        self.first = self._closure([*sent, *fixed])
        for node in self.calls:  # the results of a call, with the call
            if node.target is operator.getitem and node.all_input_nodes[0] in self.first:
                self.first.add(node)
        self._flops = {n: node_flops(n) for n in self.calls if n not in self.first}
        self._readers: dict[fx.Node, set[fx.Node]] = {}
        for node in self.calls:
            if node not in self.first:
                self._read(node)
        for grad in self._grads:
            if grad in self.first:
                self._readers.setdefault(alias_source(grad), set()).add(grad)

    def _read(self, node: fx.Node) -> None:
        for root in map(alias_source, node.all_input_nodes):
            self._readers.setdefault(root, set()).add(node)

    def _closure(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return nodes and all that they depend on, except what is in the first part already."""
        found: set[fx.Node] = set()
        stack = [n for n in nodes if n.op != "placeholder"]
        while stack:
            node = stack.pop()
            if node not in found and node not in self.first:
                found.add(node)
                stack += [a for a in node.all_input_nodes if a.op != "placeholder"]
        return found

    def _is_ready(self, root: fx.Node) -> bool:
        return root.op == "placeholder" or root in self.first

    @staticmethod
    def bytes_of(root: fx.Node) -> int:
        return nbytes(value(root)) if isinstance(value(root), torch.Tensor) else 0

    def held(self) -> list[fx.Node]:
        """Return the roots of the storages that exist while a backward waits."""
        return [root for root, readers in self._readers.items() if readers and self._is_ready(root)]

    def save_memory(self) -> None:
        """Compute gradients in the first part if less is held then, and if no product moves."""
        for root in sorted(self.held(), key=self.bytes_of, reverse=True):
            moved = self._closure(self._fed_by(self._readers[root]))
            if not moved or any(self._flops[n] or spec_of(n) is not None for n in moved):
                continue
            if self._gain(moved) > 0:
                self._move(moved)

    def _fed_by(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the gradients that depend on these nodes of the second part."""
        found: set[fx.Node] = set()
        stack = [n for n in nodes if n not in self.first]
        while stack:
            node = stack.pop()
            if node not in found and node.op != "output":
                found.add(node)
                stack += node.users
        return [grad for grad in self._grads if grad in found]

    def _gain(self, moved: set[fx.Node]) -> int:
        """Return how many bytes fewer are held if these nodes move to the first part."""
        read = {root for n in moved for root in map(alias_source, n.all_input_nodes)}
        freed = sum(
            self.bytes_of(root)
            for root in read
            if self._is_ready(root) and self._readers[root] <= moved
        )
        made = {alias_source(n) for n in moved} & moved
        added = sum(
            self.bytes_of(root)
            for root in made
            if self._readers.get(root, set()) - moved
            or any(alias_source(grad) is root for grad in self._grads if grad in moved)
        )
        return freed - added

    def _move(self, moved: set[fx.Node]) -> None:
        self.first |= moved
        for readers in self._readers.values():
            readers -= moved
        for grad in self._grads:
            if grad in moved:
                self._readers.setdefault(alias_source(grad), set()).add(grad)
