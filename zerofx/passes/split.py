"""split: cut the joint graph into forward and backward; decide which activations are saved."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import fx

from zerofx.analysis.recompute.activations import (
    JointParts,
    Policy,
    halve,
    is_param_alias,
    kept_values,
    must_keep,
)
from zerofx.analysis.recompute.tradeoffs import solve_fraction
from zerofx.compat.graphs import LazyGraphModule, copied_node
from zerofx.ir.graphs import call, root_producer
from zerofx.ir.meta import UPDATES, OutputInfo, Phase, Role, info, place_of, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Planned
from zerofx.passes.base import Fact, Pass, Report
from zerofx.plan.fields import nearest

log = logging.getLogger("zerofx")


@dataclass(frozen=True)
class Split(Pass):
    """Cut joint into forward and backward: keep activations, or recompute them before their use.

    For a fraction, the solver picks the activations to keep with the least time to recompute, and
    treats identical layers identically.
    """

    name: ClassVar[str] = "split"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED, Fact.TIED_MERGED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})

    activations: Policy | float = "keep"

    def run(self, program: Planned) -> Report:
        if JOINT not in program.graphs:
            return Report(False, "inference: nothing to split")
        if isinstance(self.activations, Mapping):
            _check_patterns(program, self.activations)
        policy = self.activations
        if isinstance(policy, float):
            policy, reasons = solve_fraction(program, policy)
            program.decisions += reasons
        halves, joint = halve(program), program.graphs[JOINT]
        kept = kept_values(halves.parts, policy)
        builder = _Backward(joint, halves.parts, kept)
        backward = builder.build([r for _, r in halves.backward])
        updated = {place_of(s) for s, _ in halves.forward if s.role in UPDATES}
        results = [r for _, r in halves.forward]
        forward = _forward(joint, halves.parts, results, builder.saved, updated)
        program.outputs[FORWARD] = tuple(s for s, _ in halves.forward) + tuple(
            OutputInfo(Role.SAVED, name=_label(n), index=i) for i, n in enumerate(builder.saved)
        )
        program.outputs[BACKWARD] = tuple(s for s, _ in halves.backward)
        del program.outputs[JOINT], program.graphs[JOINT]
        program.graphs.update({FORWARD: forward, BACKWARD: backward})
        num = sum(1 for n in backward.graph.nodes if info(n).recomputed)
        return Report(True, f"{len(builder.saved)} values saved, {num} nodes recomputed")


def _check_patterns(program: Planned, patterns: Mapping[str, str]) -> None:
    """Warn of patterns that no unit matches: a typo, or a plan that is shared with other models."""
    units = sorted({info(n).unit for n in program.graph(JOINT).nodes})  # "" is the unit of the root
    for pattern in patterns:
        if not any(fnmatchcase(unit, pattern) for unit in units):
            log.warning(
                "Plan.activations names %r, which no unit of %s matches%s",
                pattern, program.model_name, nearest(pattern, [u for u in units if u]),
            )  # fmt: skip


def _forward(
    joint: fx.GraphModule,
    parts: JointParts,
    results: list[fx.Node | None],
    saved: list[fx.Node],
    updated: set[tuple[Role | None, str | int]],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inside = set(parts.forward)
    for node in joint.graph.nodes:
        is_input = node.op == "placeholder" and info(node).role is not Role.TANGENT
        if is_input or node in inside:
            env[node] = _copy(graph, node, env)
    outs: list[fx.Node | None] = [env[r] if isinstance(r, fx.Node) else r for r in results]
    for node in saved:
        if node.op == "placeholder" and place_of(info(node)) in updated:
            # the live tensor is written after forward; backward must see the value that forward
            # read
            outs.append(call(graph, torch.ops.aten.clone.default, (env[node],), like=env[node]))
        else:
            outs.append(env[node])
    graph.output(tuple(outs))
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not node.is_impure():
            graph.erase_node(node)
    return LazyGraphModule(joint, graph)


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    return copied_node(graph, node, env.__getitem__)


def _label(node: fx.Node) -> str:
    """Name a saved value: an input or buffer by the user's name, otherwise after its call."""
    if node.op == "placeholder":
        return info(node).name or node.name
    if node.target is operator.getitem:
        return f"{root_producer(node).name}_{node.args[1]}"
    return node.name


@dataclass
class _Backward:
    """Builder of the backward graph; it adds forward values when they are first read."""

    joint: fx.GraphModule
    parts: JointParts
    kept: set[fx.Node]
    saved: list[fx.Node] = field(default_factory=list)

    def build(self, gradients: list[fx.Node | None]) -> fx.GraphModule:
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        reads = list(self._leaves(gradients))
        order = {n: i for i, n in enumerate(self.joint.graph.nodes)}
        self.saved = sorted((n for n in reads if not is_param_alias(n)), key=order.__getitem__)
        params = sorted((n for n in reads if is_param_alias(n)), key=order.__getitem__)
        for i, node in enumerate(self.saved):
            label = _label(node)
            self.env[node] = self._placeholder(node, role=Role.SAVED, index=i, name=label)
        for node in params:
            self.env[node] = self._placeholder(node)
        for node in self.joint.graph.nodes:
            if info(node).role is Role.TANGENT:
                self.env[node] = self._placeholder(node)
        for node in self.parts.backward:
            self._emit(node)
        outs = tuple(self._read(g, None) if isinstance(g, fx.Node) else g for g in gradients)
        self.graph.output(outs)
        return LazyGraphModule(self.joint, self.graph)

    def _placeholder(self, node: fx.Node, **changes: object) -> fx.Node:
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        set_info(new, phase=Phase.BACKWARD, **changes)
        return new

    def _leaves(self, gradients: list[fx.Node | None]) -> dict[fx.Node, None]:
        """Return the placeholders that backward will read: saved values and parameters."""
        leaves: dict[fx.Node, None] = {}
        inside = set(self.parts.backward)
        seen: set[fx.Node] = set()
        stack = [a for n in self.parts.backward for a in n.all_input_nodes]
        stack += [g for g in gradients if isinstance(g, fx.Node)]
        while stack:
            node = stack.pop()
            if node in seen or node in inside or info(node).role is Role.TANGENT:
                continue
            seen.add(node)
            if self._is_leaf(node):
                leaves[node] = None
            else:
                stack.extend(node.all_input_nodes)
        return leaves

    def _is_leaf(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr" or is_param_alias(node):
            return False
        is_tensor = isinstance(value(node), torch.Tensor)
        return is_tensor and (node in self.kept or must_keep(node))

    def _emit(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self._read(source, node)
        self.env[node] = _copy(self.graph, node, self.env)
        set_info(self.env[node], phase=Phase.BACKWARD)

    def _read(self, node: fx.Node, reader: fx.Node | None) -> fx.Node:
        """Return backward's own copy of a forward value, recomputing what is not saved."""
        if node in self.env:
            return self.env[node]
        chain, stack = [], [node]
        while stack:  # post-order over missing values, without recursion: chains can be deep
            top = stack[-1]
            missing = [a for a in top.all_input_nodes if a not in self.env]
            if missing:
                stack.extend(missing)
            else:
                stack.pop()
                if top not in self.env:
                    self.env[top] = _copy(self.graph, top, self.env)
                    set_info(self.env[top], phase=Phase.BACKWARD, recomputed=True)
                    chain.append(top)
        return self.env[node]
