"""drop-copies: read a value instead of its copy, as eager PyTorch does.

torch captures a dropout that drops nothing (p=0, or in evaluation) as a copy, where eager PyTorch
hands on its argument. A program computes new values only, so that such a copy has one use: to
survive what the caller does to the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import value
from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report

_aten = torch.ops.aten
# Views of all elements of a dense tensor, for every value of a size that varies.
_WHOLE_VIEWS = frozenset({
    _aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default, _aten.squeeze.dim,
    _aten.detach.default, _aten.alias.default, _aten.t.default, _aten.transpose.int,
    _aten.permute.default,
})  # fmt: skip


@dataclass(frozen=True)
class DropCopies(Pass):
    """Replace copies that keep shape and strides by the value that they copy.

    A copy stays if it or its source lies in the storage of a result, an input, a parameter, a
    buffer or a constant: the caller may write to these. It also stays if its source is a part of a
    larger tensor, which would then live as long as the copy.
    """

    name: ClassVar[str] = "drop-copies"
    # proved like all that follows the reference
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT})

    def run(self, program: Planned) -> Report:
        dropped = 0
        for name, gm in program.graphs.items():
            results = (r for r in program.results(name) if isinstance(r, fx.Node))
            handed_out = {alias_source(result) for result in results}
            for node in list(gm.graph.nodes):
                if node.target is not _aten.clone.default or node in handed_out:
                    continue
                source = node.args[0]
                root = _whole(source)
                if root is None or root in handed_out or not _are_alike(node, source):
                    continue
                node.replace_all_uses_with(source)
                gm.graph.erase_node(node)
                dropped += 1
        return Report(dropped > 0, f"copies left out: {dropped}")


def _whole(node: fx.Node) -> fx.Node | None:
    """Return the computed tensor of which a node is a view of all elements, or None."""
    while node.target in _WHOLE_VIEWS:
        node = node.all_input_nodes[0]
    return node if node.op == "call_function" and alias_source(node) is node else None


def _are_alike(node: fx.Node, source: fx.Node) -> bool:
    one, other = value(node), value(source)
    return one.shape == other.shape and one.stride() == other.stride()
