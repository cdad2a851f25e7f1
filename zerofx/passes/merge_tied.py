"""merge-tied: one placeholder and one gradient for every tied parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.graphs import call, set_results
from zerofx.ir.meta import OutputInfo, Phase, Role, info, set_info
from zerofx.ir.program import JOINT, Planned
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class MergeTied(Pass):
    """Map every alias of a parameter to its first name; sum the gradients of the aliases."""

    name: ClassVar[str] = "merge-tied"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})

    def run(self, program: Planned) -> Report:
        canonical = {a: p.name for p in program.params.values() for a in p.aliases}
        merged = 0
        for graph in program.graphs:
            merged += _merge_placeholders(program, graph, canonical)
        if JOINT in program.graphs:
            merged += _merge_gradients(program, canonical)
        return Report(merged > 0, f"{merged} tied names merged")


def _merge_placeholders(program: Planned, graph: str, canonical: dict[str, str]) -> int:
    first: dict[str, fx.Node] = {}
    merged = 0
    for node in program.placeholders(graph, Role.PARAM):
        name = canonical.get(info(node).name, info(node).name)
        if name in first:
            node.replace_all_uses_with(first[name])
            program.graph(graph).erase_node(node)
            merged += 1
        else:
            first[name] = node
            set_info(node, name=name)
    return merged


def _merge_gradients(program: Planned, canonical: dict[str, str]) -> int:
    graph = program.graph(JOINT)
    out = graph.output_node()
    results: list[fx.Node | None] = []
    outputs: list[OutputInfo] = []
    where: dict[str, int] = {}
    merged = 0
    for spec, node in zip(program.outputs[JOINT], program.results(JOINT), strict=True):
        name = canonical.get(spec.name, spec.name)
        if spec.role is not Role.GRAD or name not in where:
            if spec.role is Role.GRAD:
                where[name] = len(results)
                spec = OutputInfo(Role.GRAD, name)
            results.append(node)
            outputs.append(spec)
            continue
        merged += 1
        before = results[where[name]]
        if before is None or node is None:
            results[where[name]] = before if node is None else node
            continue
        late, early = (
            (before, node)
            if _position(graph, before) > _position(graph, node)
            else (
                node,
                before,
            )
        )
        # a gradient that is a placeholder can only be the later one if both are: append at the end
        # then
        point = (
            graph.inserting_after(late)
            if late.op != "placeholder"
            else (graph.inserting_before(out))
        )
        with point:
            total = call(graph, torch.ops.aten.add.Tensor, (early, late), like=late)
        set_info(total, phase=Phase.BACKWARD)
        results[where[name]] = total
    set_results(graph, results)
    program.outputs[JOINT] = tuple(outputs)
    return merged


def _position(graph: fx.Graph, node: fx.Node) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n is node)
