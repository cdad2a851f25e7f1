"""drop-copies: read a value instead of its copy, or of a view that is the same tensor.

torch captures a dropout that drops nothing (p=0, or in evaluation) as a copy, where eager PyTorch
hands on its argument. A program computes new values only, so that such a copy has one use: to
survive what the caller does to the original. A captured graph also detaches what it saves, and
transposes weights for forward and back again for backward, at a few microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.graphs import alias_source, whole_source
from zerofx.ir.meta import value
from zerofx.ir.program import Planned
from zerofx.ir.verify_values import OWN_INVERSE, SAME_VALUES
from zerofx.passes.base import Fact, Pass, Report

_COPY = torch.ops.aten.clone.default


@dataclass(frozen=True)
class DropCopies(Pass):
    """Replace copies that keep shape and strides, and views that keep both, by what they copy.

    A copy stays if it or its source lies in the storage of a result, an input, a parameter, a
    buffer or a constant: the caller may write to these. It also stays if its source is a part of a
    larger tensor, which would then live as long as the copy. A view that is a result stays if what
    it views is one too, or is not computed: the caller gets tensors of its own.
    """

    name: ClassVar[str] = "drop-copies"
    # proved like all that follows the reference
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT})

    def run(self, program: Planned) -> Report:
        copies = views = 0
        for name, gm in program.graphs.items():
            results = {r for r in program.results(name) if isinstance(r, fx.Node)}
            handed_out = {alias_source(result) for result in results}
            for node in list(gm.graph.nodes):
                if node.target is _COPY:
                    source = _copied(node, handed_out)
                    copies += source is not None
                else:
                    source = _viewed(node)
                    if source is not None and node in results:
                        if source in results or alias_source(source).op != "call_function":
                            continue
                        results.add(source)
                    views += source is not None
                if source is not None:
                    node.replace_all_uses_with(source)
                    gm.graph.erase_node(node)
            gm.graph.eliminate_dead_code(is_impure_node=_stays)
        return Report(bool(copies or views), f"copies left out: {copies}, views: {views}")


def _copied(node: fx.Node, handed_out: set[fx.Node]) -> fx.Node | None:
    """Return what a copy may be replaced by, or None if it is needed."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    root = whole_source(source)
    is_computed = root.op == "call_function" and alias_source(root) is root
    if not is_computed or {root, node} & handed_out or not _are_alike(node, source):
        return None
    return source


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that a view is the same tensor as, or None."""
    if node.target in OWN_INVERSE:
        before, *dims = node.args
        assert isinstance(before, fx.Node)
        is_undone = before.target is node.target and list(before.args[1:]) == dims
        return before.all_input_nodes[0] if is_undone else None
    if node.target in SAME_VALUES:
        source = node.all_input_nodes[0]
        return source if _are_alike(node, source) else None
    return None


def _are_alike(node: fx.Node, other: fx.Node) -> bool:
    return value(node).shape == value(other).shape and value(node).stride() == value(other).stride()


def _stays(node: fx.Node) -> bool:
    return node.target not in OWN_INVERSE
