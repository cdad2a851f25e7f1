"""open-losses: take cross-entropies apart, so that each rank can sum those of its own positions.

A mean over all positions of a sequence is no sum of means over its parts: the number of positions
that count is of the whole. So a loss becomes a sum over what each position adds, divided by that
number, which is computed from all labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zerofx.ir.graphs import call
from zerofx.ir.meta import value
from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class OpenLosses(Pass):
    """Take apart the losses of a graph whose sequences are cut over `context` ranks."""

    name: ClassVar[str] = "open-losses"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})

    context: int = 1

    def run(self, program: Planned) -> Report:
        if self.context == 1:
            return Report(False, "one rank")
        opened = 0
        for gm in program.graphs.values():
            for node in list(gm.graph.nodes):
                if node.target is _aten.nll_loss_forward.default and _is_plain(node):
                    _open(gm.graph, node)
                    opened += 1
        return Report(opened > 0, f"{opened} losses taken apart")

    def options(self) -> dict[str, object]:
        return {"context": self.context}


def _is_plain(node: fx.Node) -> bool:
    """Say whether a loss has no weights of classes, and is a mean or a sum over [n, classes]."""
    logs, _, weight, reduction, _ = node.args
    is_rows = value(logs).dim() == 2  # type: ignore[arg-type]
    return weight is None and reduction in (_MEAN, _SUM) and is_rows


def _open(graph: fx.Graph, node: fx.Node) -> None:
    """Replace (loss, number of rows that count) of log-probabilities by what they are made of."""
    logs: Any
    target: Any
    logs, target, _, reduction, ignored = node.args
    given = {k: v for k, v in node.meta.items() if k != "val"}

    def make(op: Any, *args: Any, **named: Any) -> fx.Node:
        made = call(graph, op, args, named=named)
        made.meta = given | {"val": made.meta["val"]}
        return made

    dtype = value(logs).dtype
    with graph.inserting_before(node):
        counts = make(_aten.ne.Scalar, target, ignored)
        total = make(_aten._to_copy.default, make(_aten.sum.default, counts), dtype=dtype)
        zero = make(_aten.scalar_tensor.default, 0, dtype=value(target).dtype,
                    device=value(target).device)  # fmt: skip
        ids = make(_aten.where.self, counts, target, zero)
        picked = make(_aten.gather.default, logs, 1, make(_aten.unsqueeze.default, ids, 1))
        lost = make(_aten.neg.default, make(_aten.squeeze.dim, picked, 1))
        none = make(_aten.scalar_tensor.default, 0.0, dtype=dtype, device=value(logs).device)
        loss = make(_aten.sum.default, make(_aten.where.self, counts, lost, none))
        if reduction == _MEAN:
            loss = make(_aten.div.Tensor, loss, total)
    for item in list(node.users):
        item.replace_all_uses_with((loss, total)[item.args[1]])  # type: ignore[index]
        graph.erase_node(item)
    graph.erase_node(node)
