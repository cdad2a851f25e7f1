"""One weight of a graph as tiles of its rows: its readers and gradient, and their rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerofx.ir.graphs import is_alias
from zerofx.ir.meta import Phase, info, set_info, value
from zerofx.passes.tiled_ops import (
    Builder,
    Features,
    Gradient,
    Lookup,
    LookupGradient,
    Sum,
    TiledOp,
    args,
    is_flip,
)

aten = torch.ops.aten


class NotTiled(Exception):
    """A node reads a weight, or makes its gradient, in a way that cannot be done tile by tile."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node))
        self.node = node


class TiledWeight:
    """A weight's placeholder, those of its tiles, and its gradient.

    ops: every node that reads the weight or a form of it, and the products of its gradient.
    forms: the weight itself, its transposes and casts. inner: what makes the gradient of products.
    """

    def __init__(self, weight: fx.Node, tiles: Sequence[fx.Node], gradient: fx.Node | None) -> None:
        self.weight, self.tiles, self.gradient = weight, tiles, gradient
        self.ops: list[TiledOp] = []
        self.forms: dict[fx.Node, tuple[fx.Node, ...]] = {weight: ()}
        self.inner: list[fx.Node] = []
        self._made: dict[fx.Node, dict[int, fx.Node]] = {}  # part of the gradient -> its tiles

    # -- what there is --------------------------------------------------------------------------
    def find(self) -> None:
        """Find all readers, and what the gradient is made of.

        Raises:
            NotTiled: one of them cannot be done tile by tile.
        """
        self._find_reads(self.weight, False)
        if self.gradient is not None:
            self._find_products(self.gradient, False)

    def _find_reads(self, node: fx.Node, is_flipped: bool) -> None:
        for user in node.users:
            if is_flip(user) or _is_same(user):
                self.forms[user] = (*self.forms[node], user)
                self._find_reads(user, is_flipped ^ is_flip(user))
            else:
                kind = _kind_of_read(user, node, is_flipped)
                self.ops.append(kind(user, self.tiles, self.forms[node]))

    def _find_products(self, node: fx.Node, is_flipped: bool) -> None:
        """Follow the gradient back through transposes, casts and sums."""
        if len(node.users) > 1:
            raise NotTiled(node)
        if node.target is aten.mm.default:
            product = Gradient(node, self.tiles)
            product.is_flipped = is_flipped
            self.ops.append(product)
        elif node.target is aten.embedding_dense_backward.default and not args(node)[4]:
            self.ops.append(LookupGradient(node, self.tiles))
        elif is_flip(node) or _is_same(node):
            self._find_products(args(node)[0], is_flipped ^ is_flip(node))
            self.inner.append(node)
        elif _is_plain_sum(node):
            for operand in args(node):
                self._find_products(operand, is_flipped)
            self.inner.append(node)
        else:
            raise NotTiled(node)

    # -- tile by tile ---------------------------------------------------------------------------
    def rewrite(self) -> list[fx.Node | None]:
        """Put tiles in place of every reader; return the gradient of each tile.

        What backward computes of one tensor is done together: of each tile what reads the weight,
        then its gradient, beside which the next tile is gathered. Backward goes from the last tile
        to the first, since forward has just had the last.
        """
        order = list(range(len(self.tiles)))
        for group in self._together():
            together = sorted(group, key=lambda op: op.makes_gradient)
            builder = Builder(min(op.node for op in together), len(self.tiles))
            is_backward = info(together[0].node).phase is Phase.BACKWARD
            for op in together:
                op.begin(builder)
            for i in reversed(order) if is_backward else order:
                for op in together:
                    op.tile(builder, i)
            for op in together:
                found = op.end(builder)
                if found is not None:
                    op.node.replace_all_uses_with(found)
                self._made[op.node] = op.made
        for node in self.inner:
            self._made[node] = {i: self._inner(node, i) for i in order}
        if self.gradient is None:
            return [None for _ in order]
        return [self._made[self.gradient][i] for i in order]

    def _together(self) -> list[list[TiledOp]]:
        """Group backward's operators that share a tensor; the others are done alone."""
        groups: list[list[TiledOp]] = []
        for op in sorted(self.ops, key=lambda op: op.node):
            is_backward = info(op.node).phase is Phase.BACKWARD
            for group in groups if is_backward else ():
                first = group[0].node
                shares = {a for other in group for a in other.inputs()} & {*op.inputs()}
                is_there = shares and all(a < first for a in op.inputs())
                if is_there and info(first).phase is Phase.BACKWARD:
                    group.append(op)
                    break
            else:
                groups.append([op])
        return groups

    def _inner(self, node: fx.Node, i: int) -> fx.Node:
        """Add a sum, a transpose or a cast of the gradient for tile i, behind what it takes."""
        taken = tuple(self._made[a][i] if a in self._made else a for a in args(node))
        last = max(a for a in taken if isinstance(a, fx.Node))
        builder = Builder(last.next, len(self.tiles))
        return builder.call(node.target, taken, last, info(last).tile, **node.kwargs)

    def erase(self) -> None:
        """Erase what the tiles have replaced; the output no longer reads the whole gradient."""
        old = {*self.inner, *(op.node for op in self.ops), *self.forms}
        for node in sorted(old, reverse=True):
            node.graph.erase_node(node)

    # -- put together ---------------------------------------------------------------------------
    def join(self) -> list[fx.Node | None]:
        """Give readers the whole weight, put together from its tiles, and cut its gradient.

        It is put together in front of its first reader, and in backward once more, with views of
        its own: what backward reads of forward would be saved, and that is never a weight.
        """
        self.ops, self.inner, self.forms = [], [], {self.weight: ()}
        for form in self.weight.graph.nodes:
            if is_alias(form) and any(a in self.forms for a in form.all_input_nodes):
                self.forms[form] = ()
        readers = sorted({u for form in self.forms for u in form.users} - self.forms.keys())
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            known: dict[fx.Node, fx.Node] = {}
            for reader in (r for r in readers if info(r).phase is phase):
                for form in [a for a in reader.all_input_nodes if a in self.forms]:
                    reader.replace_input_with(form, self._whole(form, reader, known))
        if self.gradient is None:
            return [None for _ in self.tiles]
        parts: list[Any] = Builder(self.gradient.next, len(self.tiles)).parts(
            self.gradient, 0, self.gradient
        )
        for part in parts:
            set_info(part, phase=Phase.BACKWARD)
        return parts

    def _whole(self, form: fx.Node, reader: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a form of the weight in front of its reader; `known` are those of its phase."""
        if form not in known:
            builder = Builder(reader, len(self.tiles))
            if form is self.weight:
                known[form] = builder.call(aten.cat.default, ([*self.tiles], 0), reader)
            else:
                taken = tuple(
                    self._whole(a, reader, known) if a in self.forms else a for a in args(form)
                )
                named: dict[str, Any] = dict(form.kwargs)
                known[form] = builder.call(form.target, taken, reader, **named)
        return known[form]


def _kind_of_read(user: fx.Node, weight: fx.Node, is_flipped: bool) -> type[TiledOp]:
    """Return how a reader of the weight is done tile by tile."""
    taken = args(user)
    reads = [a for a in user.all_input_nodes if a is weight]
    is_product = user.target in (aten.mm.default, aten.addmm.default) and not user.kwargs
    if is_product and taken[-1] is weight and weight not in taken[:-1]:
        return Features if is_flipped else Sum
    is_lookup = user.target is aten.embedding.default and taken[0] is weight and len(reads) == 1
    if is_lookup and not is_flipped and not any(taken[3:]):  # by frequency, sparse
        return Lookup
    raise NotTiled(user)


def _is_same(node: fx.Node) -> bool:
    """Say whether a node gives what it takes element by element, perhaps in another format."""
    return node.target in (aten.detach.default, aten.alias.default, aten._to_copy.default)


def _is_plain_sum(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    taken = node.args
    return (
        len(taken) == 2
        and taken[0] is not taken[1]
        and all(isinstance(a, fx.Node) and value(a).shape == value(node).shape for a in taken)
    )
