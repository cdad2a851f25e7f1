"""open-experts: write experts' products on rows in slots, of which each expert has a fixed number.

A captured layer sorts its rows by expert, multiplies them in groups and puts them back in order.
Its backward does the same in reverse. How many rows a group has is data, so that nothing static
could be sent between ranks. Here the rows of a layer are put into slots (`ops.capacity`), with one
part of the slots for the rows of each rank, and grouped products become batched ones.

The rewrite goes through the graph once for each layer and follows every value that has sorted rows,
forward and backward alike. Such a value has one form or two: by slots, as products need it, or with
its rows in the order of the tokens. An index by the sorting order is then no call at all, and what
is computed row by row stays in the form that its arguments have. So weights of the router multiply
rows that have come back, and a layer sends twice in forward and twice in backward.

A layer that does more with its sorted rows stays as it was captured, which a warning says.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info, value
from zerofx.ir.placing import GROUPED, GROUPED_BACKWARD, POINTWISE
from zerofx.ir.program import Planned
from zerofx.layout.styles import divides_experts
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.parts import with_parts
from zerofx.plan.parts import Parallel

log = logging.getLogger("zerofx")
_aten = torch.ops.aten


@dataclass(frozen=True)
class OpenExperts(Pass):
    """Give each expert of a mixture a fixed number of slots for the rows of each rank."""

    name: ClassVar[str] = "open-experts"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})

    parallel: Parallel

    def run(self, program: Planned) -> Report:
        if self.parallel.capacity is None:
            return Report(False, "no capacity")
        parts = {p.name: p.part for p in with_parts(program.params.values(), self.parallel)}
        parts |= {a: parts[p.name] for p in program.params.values() for a in p.aliases}
        divided = {name for name, part in parts.items() if divides_experts(part)}
        opened: dict[str, None] = {}
        left: dict[str, str] = {}
        for gm in program.graphs.values():
            for ids, product in _layers(gm.graph, divided).items():
                layer = _Layer(gm.graph, ids, product, self.parallel)
                reason = layer.open()
                if reason:
                    left[info(product).line] = reason
                else:
                    opened[layer.told] = None
            gm.graph.eliminate_dead_code(is_impure_node=_stays)
        for line, reason in left.items():
            log.warning(
                "%s (%s): Plan.parallel.capacity = %g has no effect on these experts: %s. All "
                "ranks receive all of their tokens.",
                program.model_name, line, self.parallel.capacity, reason,
            )  # fmt: skip
        return Report(bool(opened), "; ".join(opened) or "no layer of experts that are divided")

    def options(self) -> dict[str, object]:
        return {"capacity": self.parallel.capacity}


def _stays(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure() or info(node).is_random


# -- what a layer is recognised by ----------------------------------------------------------------
_SAME = {
    _aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.clone.default,
}  # fmt: skip
_TURNED = {_aten.t.default, _aten.transpose.int, _aten.permute.default}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_SORTS = {_aten.sort.default, _aten.sort.stable}
_ZEROS = {_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default}


def _layers(graph: fx.Graph, divided: set[str]) -> dict[fx.Node, fx.Node]:
    """Return the rows' experts of each layer whose experts are divided, and its first product."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target in GROUPED or str(node.target) in GROUPED:
            _, weight, *ends = node.args
            is_divided = _source(weight, _SAME | _TURNED, divided)
            if value(weight).dim() == 3 and is_divided and len(ends) == 1:  # type: ignore[arg-type]
                found.setdefault(_experts_of(ends[0], value(weight).shape[0]), node)  # type: ignore[arg-type]
    found.pop(None, None)  # type: ignore[call-overload]
    return found


def _source(node: Any, through: set[Any], divided: set[str]) -> bool:
    while node.target in through:
        node = node.args[0]
    where = info(node)
    return where.role is Role.PARAM and where.name in divided


def _plain(node: Any) -> Any:
    """Return what a value is a copy of, in this format or another."""
    while isinstance(node, fx.Node) and node.target in _SAME:
        node = node.args[0]
    return node


def _experts_of(ends: Any, experts: int) -> fx.Node | None:
    """Return the expert of each row, if `ends` counts the rows of each expert and adds them up."""
    total = _plain(ends)
    if total.target is not _aten.cumsum.default or total.args[1] not in (0, -1):
        return None
    counts = _plain(total.args[0])
    rows = None
    if counts.target is _aten.histc.default and counts.args[1:] == (experts, 0, experts - 1):
        rows = _plain(counts.args[0])
    elif counts.target is _aten.bincount.default and len(counts.args) == 3:
        rows = _plain(counts.args[0]) if counts.args[1:] == (None, experts) else None
    elif counts.target is _aten.sum.dim_IntList and counts.args[1] == [0]:
        rows = _marked(_plain(counts.args[0]), experts)
    if rows is not None and rows.target is operator.getitem and rows.args[1] == 0:
        rows = rows.args[0].args[0] if rows.args[0].target in _SORTS else rows
    return rows


def _marked(marks: Any, experts: int) -> fx.Node | None:
    """Return ids [n], if `marks` [n, experts] compares them with 0, 1, 2, ..."""
    if marks.target is not _aten.eq.Tensor:
        return None
    ids, every = marks.args
    is_range = every.target is _aten.arange.default and every.args == (experts,)
    is_column = ids.target is _aten.unsqueeze.default and ids.args[1] in (1, -1)
    return _plain(ids.args[0]) if is_range and is_column else None


class _NotOpened(Exception):
    """A value of sorted rows is used in a way that the rewrite does not follow."""


@dataclass
class _ExpertRows:
    """A value that has sorted rows in the captured graph.

    tokens: its rows in the order of the tokens, [rows, ...]. slots: by slots, [all slots, ...].
    source: tokens [rows / per, width] of which each is taken `per` times, for a value that is that.
    widened: (rows, a copy of them in a wider format), for a value that is that: the narrow ones
        are sent.
    """

    tokens: fx.Node | None = None
    slots: fx.Node | None = None
    source: fx.Node | None = None
    widened: tuple[_ExpertRows, fx.Node] | None = None


# -- the rewrite ----------------------------------------------------------------------------------
@dataclass
class _Layer:
    """The rewrite of one layer of experts in one graph.

    ids: the expert of each row, in the order of the tokens. product: its first grouped product.
    rows: the values of sorted rows. turned: their transposes. replaced: what takes the place of
    captured values that have no sorted rows. made: the new nodes.
    """

    graph: fx.Graph
    ids: fx.Node
    product: fx.Node
    parallel: Parallel
    rows: dict[fx.Node, Any] = field(default_factory=dict)
    turned: dict[fx.Node, _ExpertRows] = field(default_factory=dict)
    orders: dict[fx.Node, int] = field(default_factory=dict)
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[fx.Node, None] = field(default_factory=dict)
    told: str = ""

    def __post_init__(self) -> None:
        self.number = value(self.ids).shape[0]
        self.experts = value(self.product.args[1]).shape[0]  # type: ignore[arg-type]
        self.at = self.ids

    def open(self) -> str:
        """Rewrite the layer; return the reason why it cannot be, or "" if it is done."""
        try:
            self._find_orders()
            self._give_slots()
            for node in list(self.graph.nodes):
                self.at = node
                self._visit(node)
        except _NotOpened as reason:
            for node in reversed(self.made):
                self.graph.erase_node(node)
            return str(reason)
        for node, new in self.replaced.items():
            node.replace_all_uses_with(new)
        return ""

    # -- indices --------------------------------------------------------------------------------
    def _find_orders(self) -> None:
        """Find the orders by which rows are sorted and put back.

        orders: 0 for the inverse of the sorting order; otherwise, the number by which that order is
        divided.
        """
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            first: Any = node.args[0] if node.args else None
            if node.target is operator.getitem and node.args[1] == 1 and first.target in _SORTS:
                if first.args[0] is self.ids:
                    self.orders[node] = 1
                elif self.orders.get(first.args[0]) == 1:
                    self.orders[node] = 0
            elif self.orders.get(first) == 1 and _is_divided(node):
                self.orders[node] = int(node.args[1])
            elif node.target is _aten.index_put.default and len(node.args[1]) == 1:
                is_range = _plain(node.args[2]).target is _aten.arange.default
                is_start = _plain(node.args[2]).args == (self.number,)
                if self.orders.get(node.args[1][0]) == 1 and is_range and is_start:
                    self.orders[node] = 0
        if not self.orders:
            raise _NotOpened("their rows are not sorted by torch.sort or argsort.")
        pers = {per for per in self.orders.values() if per > 1}
        if len(pers) > 1 or any(self.number % per for per in pers):
            raise _NotOpened("not all of their tokens have equally many experts.")
        self.per = max(pers, default=1)

    def _give_slots(self) -> None:
        """Decide the capacity, and give each row a slot."""
        ranks = self.parallel.tensor
        tokens = self.number // self.per
        self.groups = self._samples(tokens)
        if tokens % (self.groups * ranks):
            raise _NotOpened(f"{tokens} tokens are not divided by tensor = {ranks}.")
        assert self.parallel.capacity is not None
        share = self.number // ranks
        most = share // self.per if self._are_distinct() else share
        self.capacity = min(math.ceil(self.parallel.capacity * share / self.experts), most)
        self.all_slots = self.experts * ranks * self.capacity
        where = info(self.product)
        self.told = (
            f"{where.module or where.unit}: {self.capacity} slots for {share} rows of a rank"
        )
        self.at = self.ids.next
        args = (where.module or where.unit, self.experts, self.capacity, self.groups, ranks)
        given = self._make(ops.expert_slots, self.ids, *args, like=self.ids)
        self.rows_of = self._make(operator.getitem, given, 0, like=self.ids)
        self.slots_of = self._make(operator.getitem, given, 1, like=self.ids)

    def _are_distinct(self) -> bool:
        """Return whether a token has an expert at most once, as the largest of its weights are."""
        chosen = self.ids
        while chosen.target in _SAME | _VIEWS:
            chosen = chosen.args[0]  # type: ignore[assignment]
        if chosen.target is not operator.getitem or self.per == 1:
            return self.per == 1
        source: Any = chosen.args[0]
        return source.target is _aten.topk.default and value(chosen).shape[-1] == self.per

    def _samples(self, tokens: int) -> int:
        """Return into how many samples the tokens divide, if each is cut along its sequence."""
        if not self.parallel.sequence:
            return 1
        node: Any = self._source_of_tokens()
        while node is not None:
            val = value(node)
            if (
                isinstance(val, torch.Tensor)
                and val.dim() == 3
                and math.prod(val.shape[:2]) == tokens
            ):
                return int(val.shape[0])
            first = node.args[0] if node.op == "call_function" and node.args else None
            node = first if isinstance(first, fx.Node) else None
        return 1

    def _source_of_tokens(self) -> fx.Node | None:
        for node in self.graph.nodes:
            if (picked := self._picked(node)) is not None and self.orders[picked[1]] == self.per:
                return picked[0]
        return None

    def _picked(self, node: fx.Node) -> tuple[Any, Any] | None:
        """Return (x, order) if a node picks rows of x along the first dimension by an order."""
        found: tuple[Any, Any] | None = None
        if node.target is _aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
            found = node.args[0], node.args[1][0]  # type: ignore[index]
        elif node.target is _aten.index_select.default and node.args[1] == 0:
            found = node.args[0], node.args[2]
        return found if found is not None and found[1] in self.orders else None

    def _put(self, node: fx.Node) -> tuple[Any, Any, Any] | None:
        """Return (order, rows, base) if a node adds rows to base at the positions of an order."""
        found: tuple[Any, Any, Any] | None = None
        if node.target is _aten.index_put.default and len(node.args[1]) == 1:  # type: ignore[arg-type]
            args: list[Any] = list(node.args)
            base, (order,), rows, *more = args
            is_sum = bool(more and more[0]) or self.orders.get(order) in (0, 1)
            found = (order, rows, base) if is_sum else None
        elif node.target is _aten.index_add.default and node.args[1] == 0 and not node.kwargs:
            base, _, order, rows = node.args
            found = order, rows, base
        return found if found is not None and found[0] in self.orders else None

    # -- nodes ----------------------------------------------------------------------------------
    def _make(self, target: Any, *args: Any, like: fx.Node | None = None, **named: Any) -> fx.Node:
        """Insert a call before the present node, with the notes of that or of another node."""
        like = like or self.at
        with self.graph.inserting_before(self.at):
            if target is operator.getitem:
                made = self.graph.call_function(target, args)
                made.meta["val"] = value(args[0])[args[1]]
            else:
                made = call(self.graph, target, args, named=named)
        made.meta = {k: v for k, v in like.meta.items() if k != "val"} | {"val": made.meta["val"]}
        self.made[made] = None
        return made

    def _visit(self, node: fx.Node) -> None:
        if node.op != "call_function" or node in self.orders or node in self.made:
            return
        if (picked := self._picked(node)) is not None:
            self._pick(node, *picked)
        elif (put := self._put(node)) is not None:
            self._put_back(node, *put)
        elif node.target in _ZEROS:
            return  # they take a form, not values, and what is put into them is followed
        elif any(n in self.rows or n in self.turned for n in node.all_input_nodes):
            self._follow(node)

    def _pick(self, node: fx.Node, x: fx.Node, order: fx.Node) -> None:
        by = self.orders[order]
        if by == 0:  # rows that were sorted, back in the order of the tokens
            if x not in self.rows:
                raise self._unknown(node)
            self.replaced[node] = self._tokens(self.rows[x])
        elif x in self.rows:
            raise self._unknown(node)
        elif by == 1:
            self.rows[node] = _ExpertRows(tokens=x)
        elif value(x).dim() == 2:
            self.rows[node] = _ExpertRows(source=x)
        else:
            raise self._unknown(node)

    def _put_back(self, node: fx.Node, order: fx.Node, rows: fx.Node, base: fx.Node) -> None:
        by, is_zero = self.orders[order], base.target in _ZEROS
        if by == 0:  # the gradient of rows in the order of the tokens
            if rows in self.rows or not is_zero:
                raise self._unknown(node)
            self.rows[node] = _ExpertRows(tokens=rows)
            return
        if rows not in self.rows:
            raise self._unknown(node)
        total = self._tokens(self.rows[rows])
        if by > 1:
            each = list(value(total).shape)
            total = self._make(_aten.view.default, total, [each[0] // by, by, *each[1:]])
            total = self._make(_aten.sum.dim_IntList, total, [1])
        self.replaced[node] = total if is_zero else self._make(_aten.add.Tensor, base, total)

    def _follow(self, node: fx.Node) -> None:
        """Make a call on sorted rows a call on rows in another form."""
        if node.target in GROUPED or str(node.target) in GROUPED:
            self._product(node)
        elif str(node.target) == GROUPED_BACKWARD:
            self._product_backward(node)
        elif node.target is operator.getitem:
            source, index = node.args
            found = self.rows[source][index]  # type: ignore[index]
            if isinstance(found, _ExpertRows):
                self.rows[node] = found
            else:
                self.replaced[node] = found
        elif node.target in _TURNED and value(node).dim() == 2 and node.args[0] in self.rows:
            self.turned[node] = self.rows[node.args[0]]  # type: ignore[index]
        elif node.target in _BY_ROW and not info(node).is_random:
            self._by_row(node)
        else:
            raise self._unknown(node)

    def _unknown(self, node: fx.Node) -> _NotOpened:
        return _NotOpened(f"{node.target} of their sorted rows is not known.")

    # -- products -------------------------------------------------------------------------------
    def _is_of_layer(self, ends: Any) -> bool:
        return _experts_of(ends, self.experts) is self.ids

    def _product(self, node: fx.Node) -> None:
        a, b, ends, *more = node.args
        if more or node.kwargs or not self._is_of_layer(ends):
            raise self._unknown(node)
        if value(b).dim() == 3 and a in self.rows:  # type: ignore[arg-type]
            made = self._make(_aten.bmm.default, self._by_expert(self.rows[a]), b)  # type: ignore[index]
            self.rows[node] = self._of_slots(made)
        elif a in self.turned and b in self.rows:
            self.replaced[node] = self._weights(self.turned[a], self.rows[b])  # type: ignore[index]
        else:
            raise self._unknown(node)

    def _product_backward(self, node: fx.Node) -> None:
        x, weight, ends, grad = node.args
        if x not in self.rows or grad not in self.rows or not self._is_of_layer(ends):
            raise self._unknown(node)
        back = self._make(_aten.transpose.int, weight, 1, 2)
        steps = self._by_expert(self.rows[grad])  # type: ignore[index]
        of_rows = self._of_slots(self._make(_aten.bmm.default, steps, back))
        of_weights = self._weights(self.rows[x], self.rows[grad])  # type: ignore[index]
        self.rows[node] = (of_rows, of_weights)

    def _weights(self, rows: _ExpertRows, grads: _ExpertRows) -> fx.Node:
        """Return the gradient of the experts' matrices, [experts, in, out]."""
        x, steps = self._by_expert(rows), self._by_expert(grads)
        return self._make(_aten.bmm.default, self._make(_aten.transpose.int, x, 1, 2), steps)

    # -- forms ----------------------------------------------------------------------------------
    def _of_slots(self, by_expert: fx.Node) -> _ExpertRows:
        width = value(by_expert).shape[2]
        return _ExpertRows(slots=self._make(_aten.view.default, by_expert, [self.all_slots, width]))

    def _by_expert(self, rows: _ExpertRows) -> fx.Node:
        """Return rows in slots as [experts, slots, width]."""
        x = self._slots(rows)
        if x.target is _aten.view.default and x.args[0] in self.made:
            source: Any = x.args[0]
            if list(value(source).shape[:2]) == [self.experts, self.all_slots // self.experts]:
                return source  # type: ignore[no-any-return]
        shape = [self.experts, self.all_slots // self.experts, value(x).shape[1]]
        return self._make(_aten.view.default, x, shape)

    def _slots(self, rows: _ExpertRows) -> fx.Node:
        if rows.slots is None:
            per, x = (1, rows.tokens) if rows.source is None else (self.per, rows.source)
            assert x is not None
            if value(x).dim() != 2:
                raise _NotOpened("their rows have more than one dimension.")
            args = (self.rows_of, self.groups, self.parallel.tensor, per)
            rows.slots = self._of_slots(self._make(ops.rows_to_slots, x, *args)).slots
        assert rows.slots is not None
        return rows.slots

    def _tokens(self, rows: _ExpertRows) -> fx.Node:
        if rows.tokens is None and rows.source is not None:
            tokens, width = value(rows.source).shape
            each = self._make(_aten.unsqueeze.default, rows.source, 1)
            each = self._make(_aten.expand.default, each, [tokens, self.per, width])
            rows.tokens = self._make(_aten.reshape.default, each, [self.number, width])
        elif rows.tokens is None and rows.widened is not None:
            narrow, copy = rows.widened
            tokens = self._tokens(narrow)
            named: dict[str, Any] = dict(copy.kwargs)
            rows.tokens = self._make(copy.target, tokens, *copy.args[1:], **named)
        elif rows.tokens is None:
            if value(self._slots(rows)).dim() != 2:
                raise _NotOpened("their rows have more than one dimension.")
            args = (self.slots_of, self.groups, self.parallel.tensor)
            rows.tokens = self._make(ops.rows_from_slots, self._by_expert(rows), *args)
        return rows.tokens

    def _by_row(self, node: fx.Node) -> None:
        """Make a call that computes each row on its own, in the form that its arguments have.

        If one of them has rows in the order of the tokens alone, all are brought to that order.
        """
        given = [n for n in node.all_input_nodes if n in self.rows]
        is_of_tokens = any(self.rows[n].slots is None for n in given)
        form, number = self._tokens, self.number
        if not is_of_tokens:
            form, number = self._slots, self.all_slots
        results = value(node)
        is_one = isinstance(results, torch.Tensor)
        self._check_rows(node, [results] if is_one else results)
        args: Any = fx.node.map_arg(
            node.args, lambda n: form(self.rows[n]) if n in self.rows else n
        )
        named: dict[str, Any] = dict(node.kwargs)
        if node.target in _SIZED:
            sizes = list(args[1])
            sizes[0] = number if sizes[0] == self.number else sizes[0]
            args = (args[0], sizes, *args[2:])
        made = self._make(node.target, *args, **named)
        found = value(made)
        for val in [found] if is_one else found:
            if val.shape[0] != number:
                raise self._unknown(node)
        if is_one:
            self.rows[node] = self._formed(made, is_of_tokens)
            is_copy = node.target is _aten._to_copy.default and not is_of_tokens
            if is_copy and value(given[0]).element_size() < results.element_size():
                self.rows[node].widened = (self.rows[given[0]], node)
            return
        self.rows[node] = tuple(
            self._formed(self._make(operator.getitem, made, i), is_of_tokens)
            for i in range(len(found))
        )

    def _check_rows(self, node: fx.Node, results: Sequence[Any]) -> None:
        """Raise unless a call computes each row on its own: of rows, and of what all rows share."""
        for val in results:
            if not isinstance(val, torch.Tensor) or val.dim() == 0 or val.shape[0] != self.number:
                raise self._unknown(node)
        for other in node.all_input_nodes:
            val = value(other)
            is_shared = val.dim() < results[0].dim() or val.shape[:1] == (1,)
            if other not in self.rows and not is_shared:
                raise self._unknown(node)
        if any(dim == 0 for dim in _dims_of(node)):
            raise self._unknown(node)

    def _formed(self, made: fx.Node, is_of_tokens: bool) -> _ExpertRows:
        return _ExpertRows(tokens=made) if is_of_tokens else _ExpertRows(slots=made)


def _is_divided(node: fx.Node) -> bool:
    """Return whether a node divides whole numbers by one and drops the rest."""
    if len(node.args) < 2 or not isinstance(node.args[1], int):
        return False
    is_floor = node.kwargs.get("rounding_mode") in ("floor", "trunc")
    return node.target is _aten.floor_divide.default or (
        node.target is _aten.div.Tensor_mode and is_floor
    )


_SIZED = {*_VIEWS, _aten.expand.default, _aten.slice_backward.default}
_ALONG = {  # the position of the dimension, or of the dimensions, of an operator
    _aten.slice.Tensor: 1, _aten.slice_backward.default: 2, _aten.split.Tensor: 2,
    _aten.split_with_sizes.default: 2, _aten.cat.default: 1, _aten.sum.dim_IntList: 1,
    _aten.mean.dim: 1, _aten.unsqueeze.default: 1, _aten.squeeze.dim: 1,
}  # fmt: skip
_BY_ROW = {*POINTWISE, *_SIZED, *_ALONG}


def _dims_of(node: fx.Node) -> Iterator[int]:
    """Yield the dimensions along which an operator works, counted from the first."""
    if node.target not in _ALONG:
        return
    position = _ALONG[node.target]
    given: Any = node.args[position] if len(node.args) > position else 0
    results = value(node)
    one = results if isinstance(results, torch.Tensor) else results[0]
    source: Any = node.all_input_nodes[0]
    count = max(one.dim(), value(source).dim())
    for dim in given if isinstance(given, (list, tuple)) else [given]:
        yield dim % count
