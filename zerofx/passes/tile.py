"""tile: execute large layers tile by tile, each tile gathered and reduced on its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from zerofx.compat.graphs import op_name
from zerofx.errors import PlanError
from zerofx.ir.graphs import fake_value, is_alias, set_results, value_of
from zerofx.ir.meta import Info, OutputInfo, Phase, Role, info, set_info, value
from zerofx.ir.program import JOINT, ParamInfo, Planned
from zerofx.layout import tiles as layout_tiles
from zerofx.layout.buckets import Layout
from zerofx.layout.tiles import TileSplit
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.parts import with_parts
from zerofx.passes.tiling import choose_tiles, describe, tile_info, tiles_of_param, with_tiles
from zerofx.plan.plan import Plan


@dataclass(frozen=True)
class Tile(Pass):
    """Replace a weight by tiles of its rows, and each product with it by one product per tile.

    y = x W^T + b becomes cat_i(x W_i^T + b_i), and dx = dy W becomes sum_i dy_i W_i; the gradient
    of W_i is dy_i^T x. If the tensor axis cuts W, each rank's part of it is tiled: the rows of a
    tile are those of all ranks' parts, and the pass `place` cuts them like W. To all later passes
    each tile is a separate parameter with its own gather, release and reduction. With k tiles, the
    memory gathered at a time falls to 1/k. To the user the weight remains one parameter. A sum over
    tiles rounds differently from a single product. Like fuse, this pass therefore runs before the
    reference is taken, against which later passes are proved.

    Under "auto", if something other than a linear or an embedding layer reads a weight, the weight
    is assembled from its tiles for that reader. Under a pattern this is an error.

    Raises:
        PlanError: see choose_tiles; or a reader of a weight that a pattern names cannot be tiled.

    Source: ZeRO-Infinity (arXiv 2104.07857), section 5.1.3, memory-centric tiling.
    """

    name: ClassVar[str] = "tile"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED, Fact.SPLIT})

    plan: Plan
    world_size: int
    layout: Layout | None = None

    def run(self, program: Planned) -> Report:
        held = {p.name: p for p in with_parts(program.params.values(), self.plan.parallel)}
        counts = (
            self.layout.tiles
            if self.layout is not None
            else choose_tiles(held.values(), self.plan, self.world_size)
        )
        params: dict[str, ParamInfo] = {}
        for name, param in program.params.items():
            tiles = tiles_of_param(held[name], counts.get(name, 0))
            if tiles:
                _tile(program, param, tiles, is_asked_for=self.plan.tiling != "auto")
            made = [tile_info(param, tile) for tile in tiles] or [param]
            params |= {p.name: p for p in made}
        program.params = params
        tiled = with_tiles(held.values(), counts)
        summary = describe(tiled, self.plan, self.world_size)
        return Report(bool(counts), summary)

    def options(self) -> dict[str, object]:
        tiling = self.plan.tiling
        return {"tiling": tiling if isinstance(tiling, str) else dict(tiling)}


def _tile(
    program: Planned, param: ParamInfo, tiles: Sequence[layout_tiles.Tile], is_asked_for: bool
) -> None:
    """Replace one parameter in every graph, and its gradient in the results."""
    infos = [tile_info(param, tile) for tile in tiles]
    for name in program.graphs:
        weights = [w for w in program.placeholders(name, Role.PARAM) if info(w).name == param.name]
        for weight in weights:
            tiled = TiledWeight(
                weight, _placeholders(weight, infos), _gradient(program, param), tiles[0].split
            )
            try:
                tiled.find()
            except NotTiled as error:
                if is_asked_for:
                    raise _refusal(param, len(tiles), error) from None
                gradients = tiled.join()
            else:
                gradients = tiled.rewrite()
            if name == JOINT:
                _replace_gradient(program, param.name, infos, gradients)
            tiled.erase()


def _placeholders(weight: fx.Node, infos: list[ParamInfo]) -> list[fx.Node]:
    """Insert a placeholder for each tile after the placeholder of the whole weight."""
    graph, last, made = weight.graph, weight, []
    for number, part in enumerate(infos):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{weight.name}_tile_{number}")
        last.meta["val"] = value(weight).new_empty(part.shape)
        set_info(last, role=Role.PARAM, name=part.name, unit=part.unit)
        made.append(last)
    return made


def _gradient(program: Planned, param: ParamInfo) -> fx.Node | None:
    """Return the gradient of a parameter, or None if it has none."""
    if JOINT not in program.graphs:
        return None
    pairs = zip(program.outputs[JOINT], program.results(JOINT), strict=True)
    return next((n for s, n in pairs if s.role is Role.GRAD and s.name == param.name), None)


def _replace_gradient(
    program: Planned, name: str, infos: list[ParamInfo], gradients: list[fx.Node | None]
) -> None:
    outputs, results = [], []
    for spec, node in zip(program.outputs[JOINT], program.results(JOINT), strict=True):
        if spec.role is Role.GRAD and spec.name == name:
            outputs += [OutputInfo(Role.GRAD, part.name) for part in infos]
            results += gradients
        else:
            outputs.append(spec)
            results.append(node)
    program.outputs[JOINT] = tuple(outputs)
    set_results(program.graph(JOINT), results)


def _refusal(param: ParamInfo, count: int, error: NotTiled) -> PlanError:
    where = info(error.node).line
    at = f" at {where}" if where else ""
    return PlanError(
        f"Plan.tiling asks for {count} tiles of {param.name} {list(param.shape)}, but "
        f"{error.node.target}{at} reads it or its gradient, and only the products and lookups of "
        "linear and embedding layers run tile by tile. Leave it out of the patterns."
    )


# -- The operators of linear and embedding layers, forward and backward, executed tile by tile -----
# W [rows, cols] comes as k tiles W_i [rows / k, cols]. If the tensor axis cuts rows, the rows are
# viewed as [groups, ranks, tiles of a group, rest], and a tile has the rest on all ranks. Each
# class represents one node of the graph: `begin` prepares what all tiles share, `tile` adds the
# nodes of one tile, and `end` assembles the result. Shared nodes are created outside of the tiles,
# so that the tiles are identical and compiled once.


# -- One weight of a graph as tiles of its rows: its readers and gradient, and their rewrite -------


aten = torch.ops.aten
_WIDE = (torch.float32, torch.float64)


def args(node: fx.Node) -> Any:
    """Return a node's arguments; the op's schema defines their meaning."""
    return node.args


def is_flip(node: fx.Node) -> bool:
    """Return whether a node transposes a matrix."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return [d % 2 for d in args(node)[1]] == [1, 0]
    return node.target is aten.transpose.int and {d % 2 for d in args(node)[1:]} == {0, 1}


def unflipped(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the source of a chain of transposes, and whether their number is odd."""
    is_flipped = False
    while is_flip(node):
        node, is_flipped = args(node)[0], not is_flipped
    return node, is_flipped


class Builder:
    """A builder that adds nodes to a graph in front of one of its nodes.

    split: how a dimension that counts rows of the weight belongs to its tiles.
    """

    def __init__(self, point: fx.Node, count: int, split: TileSplit) -> None:
        self._point, self.count, self.split = point, count, split
        self._parts: dict[tuple[fx.Node, int], list[fx.Node]] = {}

    def call(
        self, target: Any, arguments: tuple[Any, ...], like: fx.Node, tile: int = -1, **named: Any
    ) -> fx.Node:
        """Add a call with its fake value, attributed to the module and line of `like`."""
        graph = self._point.graph
        base = op_name(target)[1]
        with graph.inserting_before(self._point):
            node = graph.create_node("call_function", target, arguments, named, name=base)
        node.meta["val"] = fake_value(target, value_of(arguments), named, target)
        there = info(like)
        node.meta["zfx"] = Info(
            phase=there.phase, unit=there.unit, module=there.module, line=there.line, tile=tile
        )
        return node

    def parts(self, node: fx.Node, dim: int, like: fx.Node) -> list[fx.Node]:
        """Return a tensor's equal parts along `dim`, one per tile."""
        made = self._parts.get((node, dim))
        if made is None:
            if self.split.is_plain:
                size = value(node).shape[dim] // self.count
                made = [self._slice(node, dim, i * size, size, like) for i in range(self.count)]
            else:
                made = self._rows_of_ranks(node, dim % value(node).dim(), like)
            self._parts[node, dim] = made
        return made

    def _rows_of_ranks(self, node: fx.Node, dim: int, like: fx.Node) -> list[fx.Node]:
        """Return the rows of each tile, of the parts of all ranks."""
        shape, split = list(value(node).shape), self.split
        rest = shape[dim] // (split.ranks * self.count)
        rows = (split.groups, split.ranks, split.tiles, rest)
        folded = self.call(aten.view.default, (node, _at(shape, dim, *rows)), like)
        flat, made = _at(shape, dim, split.ranks * rest), []
        for i in range(self.count):
            group, tile = divmod(i, split.tiles)
            found = self._slice(folded, dim, group, 1, like)
            found = self._slice(found, dim + 2, tile, 1, like)
            made.append(self.call(aten.reshape.default, (found, flat), like))
        return made

    def _slice(self, node: fx.Node, dim: int, start: int, size: int, like: fx.Node) -> fx.Node:
        return self.call(aten.slice.Tensor, (node, dim, start, start + size), like)

    def join(self, parts: Sequence[fx.Node], dim: int, like: fx.Node) -> fx.Node:
        """Return the tensor whose equal parts along `dim` are given, one per tile."""
        split = self.split
        if split.is_plain:
            return self.call(aten.cat.default, ([*parts], dim), like)
        shape = list(value(parts[0]).shape)
        size = shape[dim] // split.ranks
        by_rank = _at(shape, dim, split.ranks, 1, size)
        folded = [self.call(aten.view.default, (part, by_rank), like) for part in parts]
        found = self.call(aten.cat.default, (folded, dim + 1), like)
        if split.groups > 1:
            rows = (split.ranks, split.groups, split.tiles, size)
            found = self.call(aten.view.default, (found, _at(shape, dim, *rows)), like)
            found = self.call(aten.transpose.int, (found, dim, dim + 1), like)
        flat = _at(shape, dim, shape[dim] * self.count)
        return self.call(aten.reshape.default, (found, flat), like)


def _at(shape: Sequence[int], dim: int, *sizes: int) -> list[int]:
    """Return a shape with other sizes in place of that of one dimension."""
    return [*shape[:dim], *sizes, *shape[dim + 1 :]]


@dataclass
class TiledOp(ABC):
    """A node that reads the weight or computes its gradient.

    chain: the casts and transposes from the weight to the argument that the node reads.
    made: per tile of the weight's gradient, its result, filled in as the tiles are added.
    """

    node: fx.Node
    tiles: Sequence[fx.Node]
    chain: tuple[fx.Node, ...] = ()
    made: dict[int, fx.Node] = field(default_factory=dict)

    makes_gradient: ClassVar[bool] = False

    def part(self, i: int) -> int:
        """Return the number of the layer part that tile i of this node belongs to.

        Gradients are separate parts: the weight's tile is released before they are computed.
        """
        return i + self.makes_gradient * len(self.tiles)

    def inputs(self) -> list[fx.Node]:
        """Return the node's inputs other than the weight."""
        mine = {self.tiles[0], *self.chain[-1:]}
        return [unflipped(a)[0] for a in self.node.all_input_nodes if a not in mine]

    def begin(self, builder: Builder) -> None:  # noqa: B027  # most classes share nothing
        """Add the nodes that all tiles share."""

    @abstractmethod
    def tile(self, builder: Builder, i: int) -> None:
        """Add the nodes of tile i."""

    def end(self, builder: Builder) -> fx.Node | None:
        """Add the nodes after the last tile; return the node's replacement if it was a read."""
        return None

    def _weight(self, builder: Builder, i: int) -> fx.Node:
        """Return tile i in the form in which the node reads the weight: transposed, or cast."""
        found = self.tiles[i]
        for step in self.chain:
            found = builder.call(
                step.target, (found, *step.args[1:]), self.node, self.part(i), **step.kwargs
            )
        return found


class Features(TiledOp):
    """x W^T, or b + x W^T: each tile computes its own output columns."""

    def begin(self, builder: Builder) -> None:
        self.parts: dict[int, fx.Node] = {}
        has_bias = self.node.target is aten.addmm.default
        self.bias = builder.parts(args(self.node)[0], -1, self.node) if has_bias else None

    def tile(self, builder: Builder, i: int) -> None:
        x, weight = args(self.node)[-2], self._weight(builder, i)
        taken = (x, weight) if self.bias is None else (self.bias[i], x, weight)
        self.parts[i] = builder.call(self.node.target, taken, self.node, self.part(i))

    def end(self, builder: Builder) -> fx.Node:
        parts = [part for _, part in sorted(self.parts.items())]
        return builder.join(parts, 1, self.node)


class Sum(TiledOp):
    """x W, or b + x W: the tiles' products with their columns of x, summed one after another.

    Formats narrower than fp32 are summed in fp32, so that only the products are rounded.
    """

    def begin(self, builder: Builder) -> None:
        self.columns = builder.parts(args(self.node)[-2], 1, self.node)
        has_bias = self.node.target is aten.addmm.default
        self.total: fx.Node | None = args(self.node)[0] if has_bias else None

    def tile(self, builder: Builder, i: int) -> None:
        x, weight = self.columns[i], self._weight(builder, i)
        if value(self.node).dtype in _WIDE:
            taken = (x, weight) if self.total is None else (self.total, x, weight)
            target = aten.mm.default if self.total is None else aten.addmm.default
            self.total = builder.call(target, taken, self.node, self.part(i))
            return
        product = builder.call(aten.mm.default, (x, weight), self.node, self.part(i))
        wide = builder.call(
            aten._to_copy.default, (product,), self.node, self.part(i), dtype=torch.float32
        )
        if self.total is not None:
            wide = builder.call(aten.add.Tensor, (wide, self.total), self.node, self.part(i))
        self.total = wide

    def end(self, builder: Builder) -> fx.Node:
        assert self.total is not None
        dtype = value(self.node).dtype
        if dtype in _WIDE:
            return self.total
        return builder.call(aten._to_copy.default, (self.total,), self.node, dtype=dtype)


class Gradient(TiledOp):
    """dy^T x: each tile is the product with its own columns of dy."""

    makes_gradient = True
    is_flipped = False  # True if the node computes the transpose of the gradient

    def begin(self, builder: Builder) -> None:
        cut = args(self.node)[1 if self.is_flipped else 0]
        base, self.turns = unflipped(cut)
        self.columns = builder.parts(base, 1 if self.is_flipped ^ self.turns else 0, self.node)

    def tile(self, builder: Builder, i: int) -> None:
        part = self.columns[i]
        if self.turns:
            part = builder.call(aten.t.default, (part,), self.node, self.part(i))
        a, b = args(self.node)
        taken = (a, part) if self.is_flipped else (part, b)
        self.made[i] = builder.call(aten.mm.default, taken, self.node, self.part(i))


class _Rows(TiledOp):
    """The shared part of lookups: which indices fall into each tile, and at which row of it.

    The rows of an embedding are one group.
    """

    def _find(self, builder: Builder, indices: fx.Node) -> None:
        """Add, for each tile, (indices within the tile, mask of the indices that are its own).

        An index outside of the weight stays out of range in the first or the last tile, and raises
        there.
        """
        num_rows = value(self.tiles[0]).shape[0] // builder.split.ranks
        last = len(self.tiles) - 1
        self.where: list[tuple[fx.Node, fx.Node]] = []
        of_part, start = (
            indices,
            None,
        )  # the row of a rank's part; the first of that rank's in a tile
        if builder.split.ranks > 1:
            rows = num_rows * len(self.tiles)
            of_part = builder.call(aten.remainder.Scalar, (indices, rows), self.node)
            rank = builder.call(aten.floor_divide.default, (indices, rows), self.node)
            start = builder.call(aten.mul.Tensor, (rank, num_rows), self.node)
        for i in range(last + 1):
            tests = [] if i == 0 else [(aten.ge.Scalar, i * num_rows)]
            tests += [] if i == last else [(aten.lt.Scalar, (i + 1) * num_rows)]
            held = [builder.call(test, (of_part, bound), self.node) for test, bound in tests]
            mine = held[0]
            if len(held) == 2:
                mine = builder.call(aten.bitwise_and.Tensor, (held[0], held[1]), self.node)
            inside = builder.call(aten.sub.Tensor, (of_part, i * num_rows), self.node)
            if start is not None:
                inside = builder.call(aten.add.Tensor, (inside, start), self.node)
            inside = builder.call(aten.where.ScalarOther, (mine, inside, 0), self.node)
            self.where.append((inside, builder.call(aten.unsqueeze.default, (mine, -1), self.node)))

    def _row(self, builder: Builder, index: int, i: int) -> int:
        """Return the row of tile i at which a constant index is, or -1 if it is in another tile."""
        num_rows = value(self.tiles[0]).shape[0] // builder.split.ranks
        rank, row = divmod(index, num_rows * len(self.tiles))
        row -= i * num_rows
        return rank * num_rows + row if index >= 0 and 0 <= row < num_rows else -1


class Lookup(_Rows):
    """W[indices]: each tile looks up all indices; its own rows replace the result so far."""

    def begin(self, builder: Builder) -> None:
        self._find(builder, args(self.node)[1])
        self.found: fx.Node | None = None

    def tile(self, builder: Builder, i: int) -> None:
        inside, mine = self.where[i]
        weight = self._weight(builder, i)
        found = builder.call(aten.embedding.default, (weight, inside), self.node, self.part(i))
        if self.found is not None:
            taken = (mine, found, self.found)
            found = builder.call(aten.where.self, taken, self.node, self.part(i))
        self.found = found

    def end(self, builder: Builder) -> fx.Node:
        assert self.found is not None
        return self.found


class LookupGradient(_Rows):
    """The sum of dy over each row's occurrences: a tile takes its own dy, and zeros elsewhere."""

    makes_gradient = True

    def begin(self, builder: Builder) -> None:
        self._find(builder, args(self.node)[1])

    def tile(self, builder: Builder, i: int) -> None:
        inside, mine = self.where[i]
        grad, _, _, padding, by_frequency = args(self.node)
        num_rows = value(self.tiles[0]).shape[0]
        own = builder.call(aten.where.ScalarOther, (mine, grad, 0.0), self.node, self.part(i))
        taken = (own, inside, num_rows, self._row(builder, padding, i), by_frequency)
        self.made[i] = builder.call(self.node.target, taken, self.node, self.part(i))


class NotTiled(Exception):
    """A node reads a weight, or computes its gradient, in a way that cannot be tiled."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node))
        self.node = node


class TiledWeight:
    """A weight's placeholder, the placeholders of its tiles, and its gradient.

    ops: every node that reads the weight or a form of it, and the products that compute its
        gradient.
    forms: the weight itself, its transposes and casts. inner: the nodes that combine the products
        into the gradient.
    """

    def __init__(
        self, weight: fx.Node, tiles: Sequence[fx.Node], gradient: fx.Node | None, split: TileSplit
    ) -> None:
        self.weight, self.tiles, self.gradient, self.split = weight, tiles, gradient, split
        self.ops: list[TiledOp] = []
        self.forms: dict[fx.Node, tuple[fx.Node, ...]] = {weight: ()}
        self.inner: list[fx.Node] = []
        self._made: dict[fx.Node, dict[int, fx.Node]] = {}  # part of the gradient -> its tiles

    # -- finding readers and products -----------------------------------------------------------
    def find(self) -> None:
        """Find all readers of the weight, and the products that its gradient consists of.

        Raises:
            NotTiled: one of them cannot be executed tile by tile.
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
                kind = _kind_of_read(user, node, is_flipped, self.split.groups)
                self.ops.append(kind(user, self.tiles, self.forms[node]))

    def _find_products(self, node: fx.Node, is_flipped: bool) -> None:
        """Follow the gradient back through transposes, casts and sums."""
        if len(node.users) > 1:
            raise NotTiled(node)
        if node.target is aten.mm.default:
            product = Gradient(node, self.tiles)
            product.is_flipped = is_flipped
            self.ops.append(product)
        elif (
            node.target is aten.embedding_dense_backward.default
            and not args(node)[4]
            and self.split.groups == 1
        ):
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

    # -- rewriting tile by tile -----------------------------------------------------------------
    def rewrite(self) -> list[fx.Node | None]:
        """Replace every reader by tiles; return the gradient of each tile.

        Backward's operators on one tensor are executed together. For each tile, the readers of the
        weight run first, then its gradient, while the next tile is gathered. Backward goes from the
        last tile to the first, since forward has just used the last one.
        """
        order = list(range(len(self.tiles)))
        for group in self._together():
            together = sorted(group, key=lambda op: op.makes_gradient)
            builder = Builder(min(op.node for op in together), len(self.tiles), self.split)
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
        """Group backward's operators that share a tensor; all others are alone."""
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
        """Add tile i's sum, transpose or cast of the gradient, after the nodes it reads."""
        taken = tuple(self._made[a][i] if a in self._made else a for a in args(node))
        last = max(a for a in taken if isinstance(a, fx.Node))
        builder = Builder(last.next, len(self.tiles), self.split)
        return builder.call(node.target, taken, last, info(last).tile, **node.kwargs)

    def erase(self) -> None:
        """Erase the nodes that tiles replaced; the output no longer reads the whole gradient."""
        old = {*self.inner, *(op.node for op in self.ops), *self.forms}
        for node in sorted(old, reverse=True):
            node.graph.erase_node(node)

    # -- assembling the whole weight ------------------------------------------------------------
    def join(self) -> list[fx.Node | None]:
        """Give readers the whole weight, assembled from its tiles, and split its gradient.

        The weight is assembled before its first reader, and again in backward, with separate views.
        Backward would otherwise save a value of forward, and a weight must never be saved.
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
        after = self.gradient.next
        builder = Builder(after, len(self.tiles), self.split)
        parts: list[Any] = builder.parts(self.gradient, 0, self.gradient)
        made = self.gradient.next
        while made is not after:
            set_info(made, phase=Phase.BACKWARD)
            made = made.next
        return parts

    def _whole(self, form: fx.Node, reader: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a form of the weight before its reader; `known` holds the forms of its phase."""
        if form not in known:
            builder = Builder(reader, len(self.tiles), self.split)
            if form is self.weight:
                known[form] = builder.join(self.tiles, 0, reader)
            else:
                taken = tuple(
                    self._whole(a, reader, known) if a in self.forms else a for a in args(form)
                )
                named: dict[str, Any] = dict(form.kwargs)
                known[form] = builder.call(form.target, taken, reader, **named)
        return known[form]


def _kind_of_read(user: fx.Node, weight: fx.Node, is_flipped: bool, groups: int) -> type[TiledOp]:
    """Return the class that executes a reader of the weight tile by tile."""
    taken = args(user)
    reads = [a for a in user.all_input_nodes if a is weight]
    is_product = user.target in (aten.mm.default, aten.addmm.default) and not user.kwargs
    if is_product and taken[-1] is weight and weight not in taken[:-1]:
        return Features if is_flipped else Sum
    is_lookup = user.target is aten.embedding.default and taken[0] is weight and len(reads) == 1
    if is_lookup and not is_flipped and not any(taken[3:]) and groups == 1:  # by frequency, sparse
        return Lookup
    raise NotTiled(user)


def _is_same(node: fx.Node) -> bool:
    """Return whether a node returns its input element by element, possibly in another format."""
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
