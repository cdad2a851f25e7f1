"""Placing: the ways in which an operator can run on values that are sharded over a mesh axis.

`ways(call)` is the rule table. A `Way` gives the placement of each tensor that a call reads,
the call that one rank makes on its parts, and the placement of the results. If all ranks run a way
and their results are put together, the result equals that of the whole call. Every rule is tested
for this, in all its ways, and the proof of a placed program relies on it. An operator without a
rule has
one way: all of its inputs are whole on every rank.

The pass `place` picks a way for every call. `check_placed` is a type check of placements: it
follows the placement of each value from parameters, inputs and conversions, and accepts a call only
as one of its ways. The whole call that a node records is checked against the node by the rule, and
the digests of the proof are those of whole calls. A program that passes therefore computes, on all
ranks
together, what was captured: a sum that was omitted, doubled or taken over other dimensions leaves a
value with a placement that no reader accepts.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import schema_of
from zerofx.ir.meta import Hole, OutputInfo, Placed, Role, filled, info, shape_of, tensors_of, value
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Fact, Planned
from zerofx.ir.spec import Kind, gradients_of, launch_of, launched, spec_of, spec_of_target
from zerofx.ir.verify_fault import fault, name_of
from zerofx.ir.verify_values import SAME_VALUES, Numbering
from zerofx.layout.buckets import CONTEXT
from zerofx.layout.placements import (
    Cut,
    Owned,
    P,
    Part,
    Placement,
    R,
    fits,
    local_shape,
    num_chunks,
    serves,
)
from zerofx.layout.styles import divides_experts

_aten = torch.ops.aten
Results = Placement | tuple[Placement, ...]
"""The placement of a call's result: one, or one for each tensor of a tuple."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a call reads: its whole shape, and its present placement.

    digest: of the expression of its whole value, in programs whose experts are divided among ranks.
    """

    shape: tuple[int, ...]
    now: Placement
    digest: str = field(default="", compare=False)

    @property
    def dim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class WholeCall:
    """A call on whole values. args, kwargs: its arguments, with a `Hole` for each tensor.

    result: the whole result, a fake tensor or a sequence of them. ranks: those along the axis.
    zigzag: whether a part is two chunks (see `layout.placements`).
    hints: cuts of the result that are worth considering although no input is cut that way.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    result: Any
    ranks: int
    hints: tuple[Cut, ...] = ()
    axis: str = "tensor"
    zigzag: bool = False

    @property
    def chunks(self) -> int:
        """Into how many chunks a group of a dimension that is cut is divided."""
        return num_chunks(self.ranks, self.zigzag)

    def operand(self, position: int) -> Operand:
        """Return the tensor at a position of the arguments."""
        return self.operands[self.args[position].number]

    def argument(self, position: int, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else default

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole result, if it is one tensor."""
        return tuple(self.result.shape)


@dataclass(frozen=True)
class Way:
    """One way to run a call: input placements, one rank's arguments, result placements.

    args: None for those of the whole call. op: the name of the zerofx op that a rank calls instead,
        if its part of the call depends on its rank.
    """

    needs: tuple[Placement, ...]
    gives: Results
    args: tuple[Any, ...] | None = field(default=None, compare=False)
    op: str = ""


Rule = Callable[[WholeCall], Iterator[Way]]
RULES: dict[Any, Rule] = {}
"""The rules by operator; operators that a library registers on import are given by name."""


def rule_for(*targets: Any) -> Callable[[Rule], Rule]:
    def note(rule: Rule) -> Rule:
        for target in targets:
            RULES[target] = rule
        return rule

    return note


def ways(call: WholeCall) -> Iterator[Way]:
    """Yield the ways in which a call can run: those of its rule, and whole on every rank.

    Ways that leave rows with their owners come first: they are also summands, which is less.
    """
    rule = RULES.get(call.target) or RULES.get(str(call.target))
    if rule is not None:
        for way in (*_owned_ways(call), *rule(call)):
            if _can_be_cut(call, way):
                yield way
    yield whole_way(call)


def _can_be_cut(call: WholeCall, way: Way) -> bool:
    """Return whether the operands of a way divide; results too, if parts are of two chunks.

    A rule that reads which part a rank has ("embedding_rows") counts on contiguous ones.
    """
    if call.zigzag and way.op not in ("", *RING):
        return False
    cuts: list[tuple[Any, Placement]] = list(zip(call.operands, way.needs, strict=True))
    if call.zigzag:
        is_one = not isinstance(call.result, (list, tuple))
        results = [call.result] if is_one else call.result
        cuts += [(result, item(way.gives, i)) for i, result in enumerate(results)]
    return all(fits(made.shape, c, call.chunks) for made, c in cuts if isinstance(c, Cut))


def whole_way(call: WholeCall) -> Way:
    """Return the way in which every rank executes the whole call."""
    result = call.result
    is_one = not isinstance(result, (list, tuple))
    return Way((R,) * len(call.operands), R if is_one else (R,) * len(result))


def _dim(dim: int, count: int) -> int:
    return dim % count if count else dim


# -- element by element ---------------------------------------------------------------------------
_LINEAR = {
    _aten.neg.default, _aten.detach.default, _aten.alias.default, _aten.clone.default,
    _aten._to_copy.default, _aten.mul.Scalar, _aten.div.Scalar,
}  # fmt: skip
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}
_SCALED = {_aten.mul.Tensor, _aten.div.Tensor}
POINTWISE = {
    *_LINEAR, *_SUMS, *_SCALED, _aten.add.Scalar, _aten.sub.Scalar, _aten.rsub.Scalar,
    _aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.rsqrt.default, _aten.sqrt.default,
    _aten.reciprocal.default, _aten.exp.default, _aten.log.default, _aten.cos.default,
    _aten.sin.default, _aten.tanh.default, _aten.tanh_backward.default, _aten.sigmoid.default,
    _aten.sigmoid_backward.default, _aten.silu.default, _aten.silu_backward.default,
    _aten.gelu.default, _aten.gelu_backward.default, _aten.relu.default,
    _aten.threshold_backward.default, _aten.abs.default, _aten.sgn.default, _aten.erf.default,
    _aten.maximum.default, _aten.minimum.default, _aten.clamp.default, _aten.clamp_min.default,
    _aten.where.self, _aten.where.ScalarOther, _aten.remainder.Scalar, _aten.floor_divide.default,
    _aten.masked_fill.Scalar, _aten.eq.Tensor, _aten.eq.Scalar,
    _aten.ne.Tensor, _aten.ne.Scalar, _aten.le.Tensor, _aten.le.Scalar, _aten.lt.Tensor,
    _aten.lt.Scalar, _aten.ge.Tensor, _aten.ge.Scalar, _aten.gt.Tensor, _aten.gt.Scalar,
    _aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.bitwise_not.default,
    _aten.logical_and.default, _aten.logical_or.default, _aten.logical_not.default,
    _aten.hardtanh.default, _aten.hardtanh_backward.default, _aten.leaky_relu.default,
    _aten.leaky_relu_backward.default, _aten.softplus.default, _aten.softplus_backward.default,
    _aten.elu.default, _aten.mish.default, _aten.hardswish.default,
    _aten.native_dropout_backward.default,
}  # fmt: skip


@rule_for(*POINTWISE)
def _point(call: WholeCall) -> Iterator[Way]:
    """A part of the result needs the same part of all inputs; linear calls keep partial sums."""
    shape, count = call.shape, len(call.operands)
    is_linear = call.target in _LINEAR or (call.target in _SUMS and count == 2)
    if is_linear or (call.target in _SCALED and count == 1 and call.args[0] == Hole(0)):
        yield Way((P,) * count, P)
    if call.target is _aten.where.self and count == 3:
        yield Way((R, P, P), P)  # a choice between sums is the sum of the choices
    for number in range(count if call.target in _SCALED and count == 2 else 0):
        factor = call.target is _aten.mul.Tensor or number == 0
        if factor and call.operands[number].shape == shape:
            yield Way(tuple(P if i == number else R for i in range(2)), P)
    for cut in _candidates(call, shape):
        yield Way(tuple(seen(o, cut, shape) for o in call.operands), cut)


def _candidates(call: WholeCall, shape: Sequence[int]) -> dict[Cut, None]:
    """Return the cuts of a result that its operands' cuts suggest, by dimension from the end."""
    found: dict[Cut, None] = dict.fromkeys(call.hints)
    for operand in call.operands:
        if isinstance(operand.now, Cut):
            dim = operand.now.dim + len(shape) - operand.dim
            cut = Cut(dim, operand.now.groups)
            if operand.shape[operand.now.dim] == shape[dim] and fits(shape, cut, call.ranks):
                found[cut] = None
    return found


def seen(operand: Operand, cut: Cut, shape: Sequence[int]) -> Placement:
    """Return the placement of an operand broadcast to `shape` if the result is cut."""
    dim = cut.dim - (len(shape) - operand.dim)
    is_broadcast = dim < 0 or (operand.shape[dim] == 1 and shape[cut.dim] != 1)
    return R if is_broadcast else Cut(dim, cut.groups)


# -- views ----------------------------------------------------------------------------------------
@rule_for(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
def _view(call: WholeCall) -> Iterator[Way]:
    x, shape = call.operand(0), call.shape
    yield Way((P,), P)
    if isinstance(x.now, Cut):
        for cut in viewed(x.shape, shape, x.now):
            if fits(shape, cut, call.ranks):
                local = _inferred(call, local_shape(shape, cut, call.ranks))
                yield Way((x.now,), cut, (call.args[0], local))


def _inferred(call: WholeCall, local: list[int]) -> list[int]:
    """Return the sizes that a rank's view gives: -1 wherever the whole call gives -1."""
    return [-1 if given == -1 else size for given, size in zip(call.args[1], local, strict=True)]


def viewed(before: Sequence[int], after: Sequence[int], cut: Cut) -> Iterator[Cut]:
    """Yield the cuts of a view that contain the elements of a cut of its source, in the same order.

    Both shapes are divided into runs of dimensions with equal products. Within its run, a cut keeps
    `outer` elements of the dimensions before it whole, including its groups.
    """
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        left = before[i] if i < len(before) else 1
        right = after[j] if j < len(after) else 1
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif right < left and j < len(after):
                right, j = right * after[j], j + 1
            else:
                return  # no view: an edited program may have other numbers of elements
        if first_i <= cut.dim < min(i, len(before)):
            outer = math.prod(before[first_i : cut.dim]) * cut.groups
            for dim in range(first_j, min(j, len(after))):
                ahead = math.prod(after[first_j:dim])
                if outer % ahead == 0 and after[dim] > 1:
                    yield Cut(dim, outer // ahead)
            return


def _moved(to: Callable[[WholeCall, Cut], int | None]) -> Rule:
    """Return the rule of a view that moves dimensions: `to` maps the dimension of a cut."""

    def rule(call: WholeCall) -> Iterator[Way]:
        yield Way((P,), P)
        now = call.operand(0).now
        if isinstance(now, Cut) and (dim := to(call, now)) is not None:
            yield Way((now,), Cut(dim, now.groups))

    return rule


def _t(call: WholeCall, cut: Cut) -> int:
    return 1 - cut.dim if call.operand(0).dim == 2 else cut.dim


def _transpose(call: WholeCall, cut: Cut) -> int:
    count = call.operand(0).dim
    a, b = (_dim(d, count) for d in call.args[1:3])
    return {a: b, b: a}.get(cut.dim, cut.dim)


def _permute(call: WholeCall, cut: Cut) -> int:
    count = call.operand(0).dim
    return [_dim(d, count) for d in call.args[1]].index(cut.dim)


def _unsqueeze(call: WholeCall, cut: Cut) -> int:
    return cut.dim + (_dim(call.args[1], len(call.shape)) <= cut.dim)


def _squeeze(call: WholeCall, cut: Cut) -> int | None:
    x = call.operand(0)
    given = call.args[1]
    dims = {_dim(d, x.dim) for d in (given if isinstance(given, (list, tuple)) else [given])}
    gone = {d for d in dims if x.shape[d] == 1}
    return None if cut.dim in dims else cut.dim - sum(d < cut.dim for d in gone)


_MOVED: dict[Any, Callable[[WholeCall, Cut], int | None]] = {
    _aten.t.default: _t, _aten.transpose.int: _transpose, _aten.permute.default: _permute,
    _aten.unsqueeze.default: _unsqueeze, _aten.squeeze.dim: _squeeze, _aten.squeeze.dims: _squeeze,
}  # fmt: skip
for _target, _to in _MOVED.items():
    rule_for(_target)(_moved(_to))


@rule_for(_aten.expand.default)
def _expand(call: WholeCall) -> Iterator[Way]:
    x, shape = call.operand(0), call.shape
    yield Way((P,), P)
    if isinstance(x.now, Cut):
        cut = Cut(x.now.dim + len(shape) - x.dim, x.now.groups)
        if x.shape[x.now.dim] == shape[cut.dim]:
            local = _inferred(call, local_shape(shape, cut, call.ranks))
            yield Way((x.now,), cut, (call.args[0], local, *call.args[2:]))


@rule_for(_aten.slice.Tensor)
def _slice(call: WholeCall) -> Iterator[Way]:
    x = call.operand(0)
    dim, start, stop, step = _slice_of(call.args[1:], x)
    yield Way((P,), P)
    now = x.now
    if not isinstance(now, Cut):
        return
    size = x.shape[dim]
    if now.dim != dim:
        yield Way((now,), now)
    elif step == 1 and (start, stop) == (0, size):
        yield Way((now,), now, (call.args[0], dim, 0, size // call.ranks))
    elif step == 1 and (stop - start) * now.groups == size and start % (stop - start) == 0:
        here = start // call.ranks, stop // call.ranks
        yield Way((now,), Cut(dim), (call.args[0], dim, *here))


def _slice_of(given: Sequence[Any], x: Operand) -> tuple[int, int, int, int]:
    completed: list[Any] = [*given, *(0, None, None, 1)[len(given) :]]
    dim, start, stop, step = completed
    dim = _dim(dim, x.dim)
    size = x.shape[dim]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    stop = size if stop is None else min(max(stop + size if stop < 0 else stop, 0), size)
    return dim, start, stop, step


@rule_for(_aten.slice_backward.default)
def _slice_backward(call: WholeCall) -> Iterator[Way]:
    grad, (_, sizes, dim, start, stop, step) = call.operand(0), call.args
    yield Way((P,), P)
    now = grad.now
    if not isinstance(now, Cut):
        return
    dim, start, stop, step = _slice_of((dim, start, stop, step), Operand(tuple(sizes), now))
    if now.dim != dim:
        yield Way((now,), now, (call.args[0], local_shape(sizes, now, call.ranks), *call.args[2:]))
        return
    size, width = sizes[dim], stop - start
    if width and step == 1 and size % width == 0 and start % width == 0 and now.groups == 1:
        cut = Cut(dim, size // width)
        here = start // call.ranks, stop // call.ranks
        local = local_shape(sizes, cut, call.ranks)
        yield Way((now,), cut, (call.args[0], local, dim, *here, 1))


@rule_for(_aten.select.int)
def _select(call: WholeCall) -> Iterator[Way]:
    x = call.operand(0)
    dim = _dim(call.args[1], x.dim)
    yield Way((P,), P)
    if isinstance(x.now, Cut) and x.now.dim != dim:
        yield Way((x.now,), Cut(x.now.dim - (dim < x.now.dim), x.now.groups))


@rule_for(_aten.select_backward.default)
def _select_backward(call: WholeCall) -> Iterator[Way]:
    grad, (_, sizes, dim, index) = call.operand(0), call.args
    dim = _dim(dim, len(sizes))
    yield Way((P,), P)
    if isinstance(grad.now, Cut):
        cut = Cut(grad.now.dim + (dim <= grad.now.dim), grad.now.groups)
        yield Way((grad.now,), cut, (call.args[0], local_shape(sizes, cut, call.ranks), dim, index))


@rule_for(_aten.split.Tensor, _aten.split_with_sizes.default)
def _split(call: WholeCall) -> Iterator[Way]:
    x, size = call.operand(0), call.args[1]
    dim, count = _dim(call.argument(2, 0), x.dim), len(call.result)
    yield Way((P,), (P,) * count)
    now = x.now
    if not isinstance(now, Cut):
        return
    sizes = [size] * count if isinstance(size, int) else list(size)
    if now.dim != dim:
        yield Way((now,), (now,) * count)
    elif len({*sizes}) == 1 and sum(sizes) == x.shape[dim] and count == now.groups:
        here = sizes[0] // call.ranks
        local = here if isinstance(size, int) else [here] * count
        yield Way((now,), (Cut(dim),) * count, (call.args[0], local, dim))


@rule_for(_aten.unbind.int)
def _unbind(call: WholeCall) -> Iterator[Way]:
    x, dim = call.operand(0), _dim(call.argument(1, 0), call.operand(0).dim)
    count = len(call.result)
    yield Way((P,), (P,) * count)
    if isinstance(x.now, Cut) and x.now.dim != dim:
        cut = Cut(x.now.dim - (dim < x.now.dim), x.now.groups)
        yield Way((x.now,), (cut,) * count)


@rule_for(_aten.cat.default)
def _cat(call: WholeCall) -> Iterator[Way]:
    count, dim = len(call.operands), _dim(call.argument(1, 0), len(call.shape))
    yield Way((P,) * count, P)
    empty = [o.shape == (0,) for o in call.operands]  # torch accepts an empty one with any others
    for cut in {o.now: None for o in call.operands if isinstance(o.now, Cut)}:
        if cut.dim != dim:
            yield Way(tuple(R if is_empty else cut for is_empty in empty), cut)
    if any(empty):
        return
    if len({o.shape[dim] for o in call.operands}) == 1:
        yield Way((Cut(dim),) * count, Cut(dim, count))


@rule_for(_aten.stack.default)
def _stack(call: WholeCall) -> Iterator[Way]:
    count, dim = len(call.operands), _dim(call.argument(1, 0), len(call.shape))
    yield Way((P,) * count, P)
    for cut in {o.now: None for o in call.operands if isinstance(o.now, Cut)}:
        yield Way((cut,) * count, Cut(cut.dim + (dim <= cut.dim), cut.groups))


# -- products -------------------------------------------------------------------------------------
@rule_for(_aten.mm.default, _aten.bmm.default)
def _product(call: WholeCall) -> Iterator[Way]:
    a, b = call.operands
    rows, inner = a.dim - 2, a.dim - 1
    yield Way((P, R), P)
    yield Way((R, P), P)
    for groups in {_groups(a, rows), 1}:
        yield Way((Cut(rows, groups), R), Cut(rows, groups))
    for groups in {_groups(b, inner), 1}:
        yield Way((R, Cut(inner, groups)), Cut(inner, groups))
    for groups in {_groups(a, inner), _groups(b, rows), 1}:
        yield Way((Cut(inner, groups), Cut(rows, groups)), P)
    if a.dim == 3:
        hinted = [cut.groups for cut in call.hints if cut.dim == 0]
        for groups in dict.fromkeys([*hinted, _groups(a, 0), _groups(b, 0), 1]):
            yield Way((Cut(0, groups), Cut(0, groups)), Cut(0, groups))


def _groups(operand: Operand, dim: int) -> int:
    now = operand.now
    return now.groups if isinstance(now, Cut) and now.dim == dim else 1


@rule_for(_aten.addmm.default)
def _addmm(call: WholeCall) -> Iterator[Way]:
    """The bias is whole or cut with the columns; place splits it off for partial sums.

    A sum that products are added to is placed like the products.
    """
    bias, a, b = call.operands
    if bias.now == P:
        yield Way((P, R, P), P)
        yield Way((P, P, R), P)
        for groups in {_groups(a, 1), _groups(b, 0), 1}:
            yield Way((P, Cut(1, groups), Cut(0, groups)), P)
    for groups in {_groups(a, 0), 1}:
        whole = bias.dim == 1 or bias.shape[0] == 1
        yield Way((R if whole else Cut(0, groups), Cut(0, groups), R), Cut(0, groups))
    for groups in {_groups(b, 1), 1}:
        yield Way((Cut(bias.dim - 1, groups), R, Cut(1, groups)), Cut(1, groups))


# -- products of experts --------------------------------------------------------------------------
GROUPED = (_aten._grouped_mm.default, "transformers.grouped_mm_fallback.default")
GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"


@rule_for(*GROUPED)
def _grouped_product(call: WholeCall) -> Iterator[Way]:
    """Multiply rows [rows, in], in groups, each by its own matrix of [groups, in, out].

    If both operands have two dimensions, the groups divide the inner one: [in, rows] with [rows,
    out] give [groups, in, out]. The ends of the groups are whole on every rank.

    Ranks that have whole experts multiply the rows of their groups alone, so that it suffices if
    these are right.
    """
    if len(call.operands) != 3:
        return
    a, b, ends = call.operands
    if ends.digest:
        args = (*call.args[:3], call.axis)
        own = Owned(0, ends.digest)
        if b.dim == 3 and a.dim == 2 and b.now == Cut(0):
            yield Way((_own(a, own), Cut(0), R), own, args, "grouped_rows")
        elif b.dim == a.dim == 2 and ends.shape[0] % call.ranks == 0:
            needs = (_own(a, Owned(1, ends.digest)), _own(b, own), R)
            number = ends.shape[0] // call.ranks
            yield Way(needs, Cut(0), (*args, number), "grouped_weights")
    yield Way((P, R, R), P)
    yield Way((R, P, R), P)
    if b.dim == 2:
        for groups in {_groups(a, 0), 1}:
            yield Way((Cut(0, groups), R, R), Cut(1, groups))
        for groups in {_groups(b, 1), 1}:
            yield Way((R, Cut(1, groups), R), Cut(2, groups))
    elif a.dim == 2:
        for groups in {_groups(b, 2), 1}:
            yield Way((R, Cut(2, groups), R), Cut(1, groups))
        for groups in {_groups(a, 1), _groups(b, 1), 1}:
            yield Way((Cut(1, groups), Cut(1, groups), R), P)


def _own(operand: Operand, owned: Owned) -> Placement:
    """Return how rows are read of which a rank needs its own: as they lie with it, or whole."""
    return owned if operand.now == owned else R


@rule_for(GROUPED_BACKWARD)
def _grouped_product_backward(call: WholeCall) -> Iterator[Way]:
    """Yield the ways to compute the gradients of the rows and of the matrices."""
    x, weight, ends, grad = call.operands
    if ends.digest and weight.now == Cut(0):
        own = Owned(0, ends.digest)
        needs = (_own(x, own), Cut(0), R, _own(grad, own))
        yield Way(needs, (own, Cut(0)), (*call.args, call.axis), "grouped_rows_backward")
    yield Way((R, R, R, P), (P, P))
    for groups in {_groups(weight, 2), _groups(grad, 1), 1}:
        yield Way((R, Cut(2, groups), R, Cut(1, groups)), (P, Cut(2, groups)))
    for groups in {_groups(weight, 1), _groups(x, 1), 1}:
        yield Way((Cut(1, groups), Cut(1, groups), R, R), (Cut(1, groups),) * 2)


# -- rows in slots of experts -------------------------------------------------------------------
@rule_for("zerofx.expert_slots.default")
def _expert_slots(call: WholeCall) -> Iterator[Way]:
    """Rows of a part fill slots of their own: each rank gives them to the rows of its part."""
    *given, groups, parts = call.args
    if parts == call.ranks and not call.zigzag:
        cut = Cut(0, groups)
        yield Way((cut,), (Cut(1), cut), (*given, groups, 1))


@rule_for("zerofx.rows_to_slots.default")
def _rows_to_slots(call: WholeCall) -> Iterator[Way]:
    x, rows, groups, parts, per = call.args
    yield Way((P, R), P)
    if parts == call.ranks and not call.zigzag:
        yield Way((Cut(0, groups), Cut(1)), Cut(1), (x, rows, groups, 1, per))


@rule_for("zerofx.rows_from_slots.default")
def _rows_from_slots(call: WholeCall) -> Iterator[Way]:
    x, slots, groups, parts = call.args
    yield Way((P, R), P)
    if parts == call.ranks and not call.zigzag:
        yield Way((Cut(1), Cut(0, groups)), Cut(0, groups), (x, slots, groups, 1))


# -- rows of experts ------------------------------------------------------------------------------
# Element by element: zero wherever the first argument is, whatever the others are.
_ZERO_OF_FIRST = {
    *_LINEAR, _aten.div.Tensor, _aten.tanh.default, _aten.silu.default, _aten.gelu.default,
    _aten.relu.default, _aten.abs.default, _aten.sgn.default, _aten.erf.default,
    _aten.sin.default, _aten.sqrt.default, _aten.leaky_relu.default, _aten.elu.default,
    _aten.mish.default, _aten.hardswish.default, _aten.tanh_backward.default,
    _aten.sigmoid_backward.default, _aten.silu_backward.default, _aten.gelu_backward.default,
    _aten.threshold_backward.default, _aten.hardtanh_backward.default,
    _aten.leaky_relu_backward.default, _aten.softplus_backward.default,
}  # fmt: skip
_IN_ORDER = {
    _aten.slice.Tensor, _aten.slice_backward.default, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.cat.default,
}  # fmt: skip
_RESHAPED = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}


def _owned_ways(call: WholeCall) -> Iterator[Way]:
    """Yield the way that leaves each row with its owner, and zeros on the other ranks."""
    for own in {o.now: None for o in call.operands if isinstance(o.now, Owned)}:
        if call.target in POINTWISE:
            needs = _owned_needs(call, own)
            if _is_zero_with(call, [need == own for need in needs]):
                yield Way(needs, own)
        elif call.target in _MOVED:
            dim = _MOVED[call.target](call, Cut(own.dim))
            if dim is not None:
                yield Way((own,), replace(own, dim=dim))
        elif call.target in _RESHAPED:
            ahead = own.dim + 1
            if call.operand(0).shape[:ahead] == call.shape[:ahead]:
                yield Way((own,), own)
        elif call.target in _IN_ORDER and _along_dim(call) != own.dim:
            is_one = not isinstance(call.result, (list, tuple))
            gives = own if is_one else (own,) * len(call.result)
            if all(o.now == own for o in call.operands):
                yield Way((own,) * len(call.operands), gives)


def _owned_needs(call: WholeCall, own: Owned) -> tuple[Placement, ...]:
    """Return how a call, element by element, reads its operands: rows that lie so as they are."""
    needs = [own if o.now == own and o.shape == call.shape else R for o in call.operands]
    if call.target is _aten.div.Tensor:  # zero by zero is not zero
        needs[1:] = [R] * len(needs[1:])
    return tuple(needs)


def _is_zero_with(call: WholeCall, lies: Sequence[bool]) -> bool:
    """Return whether a call, element by element, is zero where these operands are."""
    if call.target in _SUMS:
        return len(lies) == 2 and all(lies)
    if call.target is _aten.mul.Tensor:
        return any(lies)
    if call.target is _aten.pow.Tensor_Scalar:
        return lies[0] and call.args[1] > 0
    return call.target in _ZERO_OF_FIRST and lies[0] and call.args[0] == Hole(0)


def _along_dim(call: WholeCall) -> int:
    """Return the dimension along which a call cuts or joins."""
    at = 1 if call.target in (_aten.slice.Tensor, _aten.cat.default) else 2
    return _dim(call.argument(at, 0), call.operands[0].dim)


# -- reductions -----------------------------------------------------------------------------------
@rule_for(_aten.sum.dim_IntList)
def _sum(call: WholeCall) -> Iterator[Way]:
    x, dims = call.operand(0), _dims(call)
    yield Way((P,), P)
    if isinstance(x.now, Cut):
        if x.now.dim in dims:
            yield Way((x.now,), P)
        else:
            yield Way((x.now,), _left(x.now, dims, call))


@rule_for(_aten.sum.default)
def _sum_all(call: WholeCall) -> Iterator[Way]:
    yield Way((P,), P)
    now = call.operand(0).now
    if isinstance(now, Cut):
        yield Way((now,), P)


@rule_for(_aten.mean.dim, _aten.amax.default, _aten.amin.default)
def _along(call: WholeCall) -> Iterator[Way]:
    x, dims = call.operand(0), _dims(call)
    if call.target is _aten.mean.dim:
        yield Way((P,), P)
    if isinstance(x.now, Cut) and x.now.dim not in dims:
        yield Way((x.now,), _left(x.now, dims, call))


def _dims(call: WholeCall) -> set[int]:
    count, given = call.operand(0).dim, call.argument(1)
    return {_dim(d, count) for d in given} if given else {*range(count)}


def _left(cut: Cut, dims: set[int], call: WholeCall) -> Cut:
    """Return a cut after a reduction over other dimensions."""
    keeps = len(call.shape) == call.operand(0).dim
    return cut if keeps else Cut(cut.dim - sum(d < cut.dim for d in dims), cut.groups)


@rule_for(
    _aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default,
    _aten.cumsum.default,
)  # fmt: skip
def _softmax(call: WholeCall) -> Iterator[Way]:
    x = call.operand(0)
    if isinstance(x.now, Cut) and x.now.dim != _dim(call.args[1], x.dim):
        yield Way((x.now,), x.now)


@rule_for(_aten.topk.default, _aten.max.dim, _aten.min.dim)
def _largest(call: WholeCall) -> Iterator[Way]:
    """Values and positions along a dimension that is whole."""
    x = call.operand(0)
    is_topk = call.target is _aten.topk.default
    dim = _dim(call.argument(2 if is_topk else 1, -1), x.dim)
    if isinstance(x.now, Cut) and x.now.dim != dim:
        keeps = is_topk or call.argument(2, False)
        cut = x.now if keeps else Cut(x.now.dim - (dim < x.now.dim), x.now.groups)
        yield Way((x.now,), (cut, cut))


@rule_for(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
def _softmax_backward(call: WholeCall) -> Iterator[Way]:
    grad, out = call.operands
    yield Way((P, R), P)
    for cut in {o.now: None for o in (grad, out) if isinstance(o.now, Cut)}:
        if cut.dim != _dim(call.args[2], out.dim):
            yield Way((cut, cut), cut)


# -- tables ---------------------------------------------------------------------------------------
@rule_for(_aten.embedding.default)
def _embedding(call: WholeCall) -> Iterator[Way]:
    table, ids = call.operands
    if table.now == Cut(0):
        rows = table.shape[0] // call.ranks
        yield Way((Cut(0), R), P, (*call.args[:2], call.axis, rows), "embedding_rows")
    for groups in {_groups(table, 1), 1}:
        yield Way((Cut(1, groups), R), Cut(ids.dim, groups))
    for cut in dict.fromkeys([ids.now, *call.hints]):
        if isinstance(cut, Cut) and cut.dim < ids.dim:
            yield Way((R, cut), cut)


@rule_for(_aten.embedding_dense_backward.default)
def _embedding_backward(call: WholeCall) -> Iterator[Way]:
    grad, ids = call.operands
    yield Way((P, R), P)
    if call.args[4]:  # scaled by each row's frequency, which depends on all ids
        return
    if call.args[2] % call.ranks == 0:
        rows, padding = call.args[2] // call.ranks, call.args[3]
        args = (*call.args[:2], call.axis, rows, padding)
        yield Way((R, R), Cut(0), args, "embedding_rows_backward")
    last = grad.dim - 1
    for groups in {_groups(grad, last), 1}:
        yield Way((Cut(last, groups), R), Cut(1, groups))
    for cut in {o.now: None for o in (grad, ids) if isinstance(o.now, Cut) and o.now.dim != last}:
        yield Way((cut, cut), P)


@rule_for(_aten.nll_loss_backward.default)
def _loss_backward(call: WholeCall) -> Iterator[Way]:
    """Rows of log-probabilities, whose loss is summed: how many count is given whole."""
    logs, target = call.operands[1:3]
    if len(call.operands) == 4 and logs.dim == 2 and call.args[4] != 0:
        for cut in {o.now: None for o in (logs, target) if isinstance(o.now, Cut)}:
            if cut.dim == 0:
                yield Way((R, cut, cut, R), cut)


@rule_for(_aten.index.Tensor)
def _index(call: WholeCall) -> Iterator[Way]:
    """Rows picked by one whole index along the first dimension."""
    x, indices = call.operand(0), call.args[1]
    if len(call.operands) != 2 or not isinstance(indices[0], Hole):
        return
    ids = call.operands[1]
    yield Way((P, R), P)
    if isinstance(x.now, Cut) and x.now.dim > 0 and len(call.shape) == x.dim - 1 + ids.dim:
        yield Way((x.now, R), Cut(x.now.dim - 1 + ids.dim, x.now.groups))


@rule_for(_aten.index_put.default)
def _index_put(call: WholeCall) -> Iterator[Way]:
    """Rows written or added at the positions of one whole index along the first dimension."""
    x, indices = call.operand(0), call.args[1]
    if len(call.operands) != 3 or not isinstance(indices[0], Hole) or len(indices) != 1:
        return
    ids, values = call.operands[1:]
    if call.argument(3, False):
        yield Way((P, R, P), P)
    if values.shape != (*ids.shape, *x.shape[1:]):
        return
    shift = ids.dim - 1
    moved = (Cut(v.dim - shift, v.groups) for v in (values.now,) if isinstance(v, Cut))
    for cut in {c: None for c in (x.now, *moved) if isinstance(c, Cut) and c.dim > 0}:
        yield Way((cut, R, Cut(cut.dim + shift, cut.groups)), cut)


@rule_for(_aten.new_zeros.default)
def _new_zeros(call: WholeCall) -> Iterator[Way]:
    """Zeros can have any placement; that of the template tensor is the most likely to be needed."""
    x, shape = call.operand(0), call.shape
    yield Way((P,), P)
    for cut in _candidates(call, shape):
        if isinstance(x.now, Cut) and cut.dim == x.now.dim + len(shape) - x.dim:
            local = local_shape(shape, cut, call.ranks)
            yield Way((x.now,), cut, (call.args[0], local, *call.args[2:]))


@rule_for(_aten.gather.default)
def _gather(call: WholeCall) -> Iterator[Way]:
    x, ids = call.operands
    dim = _dim(call.args[1], x.dim)
    yield Way((P, R), P)
    for cut in {o.now: None for o in (x, ids) if isinstance(o.now, Cut)}:
        if cut.dim != dim and x.shape[cut.dim] == ids.shape[cut.dim]:
            yield Way((cut, cut), cut)


@rule_for(_aten.scatter.src)
def _scatter(call: WholeCall) -> Iterator[Way]:
    """Values written along a dimension that is whole."""
    x, ids, given = call.operands
    dim = _dim(call.args[1], x.dim)
    for cut in {o.now: None for o in call.operands if isinstance(o.now, Cut)}:
        if cut.dim != dim and x.shape[cut.dim] == ids.shape[cut.dim] == given.shape[cut.dim]:
            yield Way((cut, cut, cut), cut)


# -- layers ---------------------------------------------------------------------------------------
@rule_for(_aten.native_layer_norm.default)
def _layer_norm(call: WholeCall) -> Iterator[Way]:
    x, normed = call.operand(0), len(call.args[1])
    if isinstance(x.now, Cut) and x.now.dim < x.dim - normed:
        rest = (R,) * (len(call.operands) - 1)
        yield Way((x.now, *rest), (x.now,) * 3)


@rule_for(_aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: WholeCall) -> Iterator[Way]:
    grad, x, normed = call.operand(0), call.operand(1), len(call.args[2])
    for cut in {o.now: None for o in (x, grad) if isinstance(o.now, Cut)}:
        if cut.dim < x.dim - normed:
            rest = (R,) * (len(call.operands) - 4)
            yield Way((cut,) * 4 + rest, (cut, P, P))


_HEADS = (0, 1)  # of [batch, heads, length, width]: attention is independent per batch and head


@rule_for(_aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(call: WholeCall) -> Iterator[Way]:
    yield from _by_heads(call, call.operand(0), given=3)


@rule_for(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(call: WholeCall) -> Iterator[Way]:
    yield from _by_heads(call, call.operand(1), given=6)


def _by_heads(call: WholeCall, query: Operand, given: int) -> Iterator[Way]:
    """Cut queries, keys, values and related tensors by batch or head; also a mask if possible.

    Keys must have as many heads as queries, otherwise a rank's queries would need another rank's
    keys.
    """
    cuts = [query.now] if isinstance(query.now, Cut) else []
    for cut in dict.fromkeys([*cuts, Cut(1), Cut(0)]):
        if cut.dim not in _HEADS or not fits(query.shape, cut, call.ranks):
            continue
        first = call.operands[:given]
        if any(o.shape[cut.dim] != query.shape[cut.dim] for o in first):
            continue
        masks = tuple(
            cut if o.dim == 4 and o.shape[cut.dim] > 1 else R for o in call.operands[given:]
        )
        yield Way((cut,) * given + masks, (cut,) * len(call.result))


_LENGTH = 2  # of [batch, heads, length, width]
RING = ("ring_attention", "ring_attention_backward")


@rule_for("zerofx.attention.default")
def _ring(call: WholeCall) -> Iterator[Way]:
    """Cut queries, keys and values along the sequence: keys and values travel around the ranks.

    A mask is cut like the queries: a rank has its rows of it, with all keys. Only in zigzag order
    is the work under a causal mask balanced, and the order the one that the runtime takes it to be.
    """
    yield from _around(call, "ring_attention", given=3)
    yield from _by_heads(call, call.operand(0), given=3)


@rule_for("zerofx.attention_backward.default")
def _ring_backward(call: WholeCall) -> Iterator[Way]:
    yield from _around(call, "ring_attention_backward", given=6)
    yield from _by_heads(call, call.operand(1), given=6)


def _around(call: WholeCall, op: str, given: int) -> Iterator[Way]:
    if call.zigzag:
        cut = Cut(_LENGTH)
        masks = tuple(Cut(o.dim - 2) if o.shape[-2] > 1 else R for o in call.operands[given:])
        args = (*call.args[:given], call.axis, call.ranks, *call.args[given:])
        yield Way((cut,) * given + masks, (cut,) * len(call.result), args, op)


@dataclass(frozen=True)
class _DeviceAttention:
    """Positions of arguments of an attention operator of CUDA, and how many results have heads."""

    query: int
    bias: int | None
    dropout: int
    num_results: int


_DEVICE_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default: _DeviceAttention(0, None, 3, 2),
    _aten._scaled_dot_product_flash_attention_backward.default: _DeviceAttention(1, None, 10, 3),
    _aten._scaled_dot_product_efficient_attention.default: _DeviceAttention(0, 3, 5, 2),
    _aten._scaled_dot_product_efficient_attention_backward.default: _DeviceAttention(1, 4, 9, 3),
    _aten._scaled_dot_product_cudnn_attention.default: _DeviceAttention(0, 3, 5, 2),
    _aten._scaled_dot_product_cudnn_attention_backward.default: _DeviceAttention(1, 8, 13, 3),
}


@rule_for(*_DEVICE_ATTENTION)
def _device_attention(call: WholeCall) -> Iterator[Way]:
    """Cut by batch or head what has both: queries, keys, values, sums of exponentials.

    What belongs to random draws and to sequences of other lengths is whole. Draws would have to be
    those of the whole call, and the gradient of a bias a sum over heads: then all of it is whole.
    """
    known = _DEVICE_ATTENTION[call.target]
    bias = None if known.bias is None else call.argument(known.bias)
    if call.argument(known.dropout, 0.0) or (bias is not None and any(_bias_mask(call))):
        return
    query = call.operand(known.query)
    mask = bias.number if isinstance(bias, Hole) else -1
    for cut in dict.fromkeys(
        [*([query.now] if isinstance(query.now, Cut) else []), Cut(1), Cut(0)]
    ):
        if cut.dim not in _HEADS or not fits(query.shape, cut, call.ranks):
            continue
        needs: list[Placement] = []
        for number, each in enumerate(call.operands):
            is_cut = each.dim >= 3 and (number != mask or each.shape[cut.dim] > 1)
            needs.append(cut if is_cut else R)
            if is_cut and each.shape[cut.dim] != query.shape[cut.dim]:
                break
        else:
            rest = len(call.result) - known.num_results
            yield Way(tuple(needs), (cut,) * known.num_results + (R,) * rest)


def _bias_mask(call: WholeCall) -> tuple[bool, ...]:
    """Return whether the gradient of the bias is asked for."""
    if call.target is _aten._scaled_dot_product_efficient_attention_backward.default:
        return tuple(call.argument(10)[3:])
    return ()


# -- conversions over another axis ----------------------------------------------------------------
@rule_for(
    "zerofx.reduce_values.default", "zerofx.summand.default", "zerofx.joined_value.default",
)  # fmt: skip
def _summed_elsewhere(call: WholeCall) -> Iterator[Way]:
    """Sum element by element: a part of a sum is the sum of the parts."""
    yield Way((P,), P)
    now = call.operand(0).now
    if isinstance(now, Cut) and call.shape == call.operand(0).shape:
        yield Way((now,), now)


@rule_for("zerofx.reduce_joined.default")
def _joined_elsewhere(call: WholeCall) -> Iterator[Way]:
    yield Way((P,) * len(call.operands), P)


_CUTS = ("zerofx.scatter_values.default", "zerofx.part.default")


@rule_for(
    "zerofx.gather_values.default", "zerofx.padded.default", "zerofx.scatter_values.default",
    "zerofx.part.default", "zerofx.swap_values.default",
)  # fmt: skip
def _moved_elsewhere(call: WholeCall) -> Iterator[Way]:
    """Put parts together along a dimension, or take parts along one, that another axis cuts or not.

    What is put together of `ranks` parts has as many times the groups of a part; and what is cut
    again has as many times fewer.
    """
    yield Way((P,), P)
    now = call.operand(0).now
    if not isinstance(now, Cut):
        return
    _, _, *ends, ranks = call.args
    is_cut_alone = str(call.target) in _CUTS
    joined, taken = ([], ends) if is_cut_alone else (ends[:2], ends[2:])
    dim, groups = now.dim, now.groups
    if joined and joined[0] == dim:
        if groups % joined[1]:
            return
        groups *= ranks
    if taken and taken[0] == dim:
        if groups % (taken[1] * ranks):
            return
        groups //= ranks
    yield Way((now,), Cut(dim, groups))


@rule_for("zerofx.embedding_rows.default")
def _looked_up_elsewhere(call: WholeCall) -> Iterator[Way]:
    ids = call.operands[1]
    for cut in dict.fromkeys([ids.now, *call.hints]):
        if isinstance(cut, Cut) and cut.dim < ids.dim:
            yield Way((R, cut), cut)


@rule_for("zerofx.embedding_rows_backward.default")
def _looked_up_elsewhere_backward(call: WholeCall) -> Iterator[Way]:
    grad, ids = call.operands
    yield Way((P, R), P)
    for cut in {o.now: None for o in (grad, ids) if isinstance(o.now, Cut)}:
        if cut.dim < ids.dim:
            yield Way((cut, cut), P)


# -- checking -------------------------------------------------------------------------------------
def item(gives: Results, index: int) -> Placement:
    """Return the placement of one of several results."""
    return gives[index] if isinstance(gives, tuple) else gives


def is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


Operands = tuple[tuple[Operand, ...], ...]
"""The tensors that a call reads, over each axis: the one that was cut last first."""
Visit = Callable[[fx.Node, Operands], Placed | None]
"""Receives a call with the tensors that it reads; returns how the result is placed, if known."""


def _noted(node: fx.Node, operands: Operands) -> Placed | None:
    """Return what a node's own note says."""
    return info(node).placed


def has_owners(program: Planned) -> bool:
    """Return whether ranks own rows: those of the experts that they have whole."""
    return any(divides_experts(p.part) for p in program.params.values())


def check_placed(program: Planned, visit: Visit = _noted) -> None:
    """Check the placements of a program's values, if the pass `place` has cut any.

    visit: returns what is said of each call's placement, which the check does not trust.

    Raises:
        ProgramError: names the value, its placement, and the placement that was needed.
    """
    if Fact.PLACED not in program.facts or not program.plan.parallel.value_axes:
        return
    saved: list[Any] = []
    numbering = Numbering(program, ()) if has_owners(program) else None
    for name in (JOINT, FORWARD, BACKWARD):
        if name in program.graphs:
            saved = _Typing(program, name, saved, visit, numbering).run()


@dataclass(frozen=True)
class _Call:
    """A call as each rank of an axis makes it: a node, or the whole call that it is a part of."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Over:
    """The placements of a graph's values over one axis.

    lies: node -> placement, one per tensor of a tuple. shapes: node -> whole shape, or one per
        tensor. inner: the axis over which the parts of these values are cut further, if there is
        one. due: the placement of the gradient of a whole parameter; the reduction of a bucket sums
        it over the context axis. digests: those of the values so far, if placements name some.
    """

    def __init__(
        self, axis: str, ranks: int, zigzag: bool, inner: _Over | None, digests: Mapping[Any, Any]
    ) -> None:
        self.axis, self.ranks, self.zigzag, self.inner = axis, ranks, zigzag, inner
        self.digests: Mapping[Any, Any] = {} if axis == CONTEXT else digests
        self.due: Placement = P if axis == CONTEXT else R
        self.lies: dict[fx.Node, Any] = {}
        self.shapes: dict[fx.Node, Any] = {}

    def local(self, node: fx.Node) -> Any:
        """Return the shape of what each rank of the axis has of a value."""
        return shape_of(value(node)) if self.inner is None else self.inner.shapes[node]

    def note(self, node: fx.Node, lies: Any, shape: Any) -> None:
        self.lies[node], self.shapes[node] = lies, shape

    def note_same(self, node: fx.Node, source: fx.Node) -> None:
        self.note(node, self.lies[source], self.shapes[source])

    def note_whole(self, node: fx.Node) -> None:
        shape = self.local(node)
        is_one = isinstance(value(node), torch.Tensor) or not isinstance(value(node), (list, tuple))
        self.note(node, R if is_one else (R,) * len(shape), shape)

    def operands(self, tensors: Sequence[fx.Node]) -> tuple[Operand, ...]:
        return tuple(
            Operand(tuple(self.shapes[t]), self.lies[t], str(self.digests.get(t, "")))
            for t in tensors
        )

    def own_part(self, part: Part | None) -> Part | None:
        """Return the part of a parameter: only over the tensor axis is one cut."""
        return None if self.axis == CONTEXT else part


class _Typing:
    """The check of one graph.

    axes: those over which values are cut, the last one first: what is whole over the context axis
        may be a part over the tensor axis.
    saved: of each value saved by forward, its placement and shape over each axis, and the bucket of
        a gathered copy. bucket: the bucket of such a copy in backward.
    numbering: the digests of the values so far, if placements name some.
    """

    def __init__(
        self, program: Planned, name: str, saved: list[Any], visit: Visit = _noted,
        numbering: Numbering | None = None,
    ) -> None:  # fmt: skip
        self.program, self.name, self.saved, self.visit = program, name, saved, visit
        parallel = program.plan.parallel
        self.axes: list[_Over] = []
        digests = {} if numbering is None else numbering.of
        for axis, ranks in reversed(parallel.value_axes.items()):
            zigzag = axis == CONTEXT and parallel.is_zigzag
            inner = self.axes[-1] if self.axes else None
            self.axes.append(_Over(axis, ranks, zigzag, inner, digests))
        self.position = program.stage.position
        self.bucket: dict[fx.Node, int] = {}
        self.at = {(b.index, p.offset): p for b in program.layout.buckets for p in b.params}
        self.numbering = numbering

    def run(self) -> list[Any]:
        kept: list[Any] = []
        for node in self.program.graph(self.name).nodes:
            if node.op == "output":
                kept = self._results(node)
            elif node.op == "placeholder":
                for number, over in enumerate(self.axes):
                    over.note(node, *self._given(number, over, node))
            elif node.op == "get_attr":
                for over in self.axes:
                    over.note(node, R, over.local(node))
            elif is_item(node):
                self._item(node)
            else:
                self._node(node)
            if self.numbering is not None:
                self.numbering.take(self.name, node)
        return kept

    def _fail(self, node: fx.Node, message: str) -> None:
        raise fault(self.program, self.name, node, message)

    def _given(self, number: int, over: _Over, node: fx.Node) -> tuple[Any, Any]:
        """Return the placement over the axis with this number, and the whole shape, of an input."""
        where = info(node)
        if where.role is Role.PARAM:
            part = over.own_part(self.program.params[where.name].part)
            return (part.cut, part.shape) if part else (R, over.local(node))
        if where.role is Role.SAVED and 0 <= where.index < len(self.saved):
            each, self.bucket[node] = self.saved[where.index]
            return each[number]  # type: ignore[no-any-return]
        for wire in self.program.stage.wires:
            if (wire.target, wire.digest, wire.leaf) == (self.position, where.digest, where.index):
                return self._wired(number, over, node, wire.lies)
        return R, over.local(node)

    def _wired(self, number: int, over: _Over, node: fx.Node, lies: Placed) -> tuple[Any, Any]:
        placed: Placed | None = lies
        for _ in range(number):
            placed = None if placed is None else placed.outer
        return (R, over.local(node)) if placed is None else (placed.gives, placed.shape)

    def _item(self, node: fx.Node) -> None:
        source: Any
        index: Any
        source, index = node.args
        for over in self.axes:
            shape = over.shapes[source]
            over.note(
                node, item(over.lies[source], index), shape[index] if shape else over.local(node)
            )

    def _node(self, node: fx.Node) -> None:
        """Follow a call over one axis after the other.

        A conversion is a call like others over the axes that were cut after its own; what it gives
        lies over those cut before as its argument does.
        """
        tensors, spec = tensors_of(node), spec_of(node)
        axis = self._axis_of(node) if spec is not None and spec.lies is not None else ""
        placed = None
        if axis != self.axes[0].axis:
            operands = tuple(over.operands(tensors) for over in self.axes)
            placed = self.visit(node, operands)
        if placed is None and spec is not None and not axis:
            self._op(node, spec)
            return
        call = _Call(node.target, node.args, node.kwargs)
        is_converted = False
        for over in self.axes:
            if is_converted:
                self._unmoved(over, node, tensors)
            elif over.axis == axis:
                self._conversion(over, node, call)
                is_converted = True
            else:
                self._call(over, node, call, placed)
                if placed is not None and placed.target is not None:
                    args = filled(placed.args, tensors), filled(placed.kwargs, tensors)
                    call, placed = _Call(placed.target, *args), placed.outer

    def _axis_of(self, node: fx.Node) -> str:
        """Return the axis of a conversion: of one of several joined values, that of their sum."""
        sums: Any = node
        while isinstance(sums, fx.Node) and not isinstance(sums.args[1], str):
            sums = sums.args[0]
            if isinstance(sums, fx.Node) and launched(sums) is not None:
                sums = launch_of(sums)
            if not isinstance(sums, fx.Node) or len(sums.args) < 2:
                self._fail(node, f"{node.name} takes a value of {name_of(node)}, which has none.")
        axis = str(sums.args[1])
        if axis not in [over.axis for over in self.axes]:
            named = " and ".join(over.axis for over in reversed(self.axes))
            self._fail(node, f"{node.name} is over the axis {axis!r}; values are over {named}.")
        return axis

    def _unmoved(self, over: _Over, node: fx.Node, tensors: Sequence[fx.Node]) -> None:
        """Follow a conversion over an axis whose parts it converts: they stay what they are."""
        if len(tensors) == 1 and over.local(node) == over.local(tensors[0]):
            over.note_same(node, tensors[0])
        elif all(over.lies[t] == R for t in tensors):
            over.note_whole(node)
        else:
            self._fail(
                node,
                f"{node.name} joins {name_of(tensors[0])}, which lies as {over.lies[tensors[0]]} "
                f"over {over.ranks} ranks of the {over.axis} axis.",
            )

    def _op(self, node: fx.Node, spec: Any) -> None:
        """Record the placement of the result of a zerofx op that changes no value."""
        if spec.kind is Kind.VIEW:
            full: Any
            offset: Any
            full, offset, _ = node.args
            piece = self.at.get((self.bucket.get(full, info(full).index), offset))
            for over in self.axes:
                part = over.own_part(piece.part) if piece is not None else None
                over.note(node, part.cut if part else R, part.shape if part else over.local(node))
            return
        self._taken(node)
        tensors = node.all_input_nodes
        follows = spec.is_value or spec.kind is Kind.WAIT
        for over in self.axes:
            if tensors and follows:
                over.note_same(node, tensors[0])
            else:
                over.note(node, R, over.local(node))

    def _taken(self, node: fx.Node) -> None:
        for grad, offset in gradients_of(node):
            piece = self.at[info(node).index, offset]
            for over in self.axes:
                part = over.own_part(piece.part)
                due = part.cut if part else over.due
                if over.lies[grad] != due:
                    self._fail(
                        node,
                        f"the gradient of {piece.name} lies as {over.lies[grad]} "
                        f"({name_of(grad)}) over the {over.axis} axis; it must lie as {due}.",
                    )

    def _conversion(self, over: _Over, node: fx.Node, call: _Call) -> None:
        spec = spec_of_target(call.target)
        if spec is None or spec.lies is None:
            self._fail(node, f"{node.name} is said to be a part of {call.target}.")
        first, axis, *_ = call.args
        is_list = isinstance(first, (list, tuple))
        given: list[Any] = list(first) if is_list else [first]
        now, shape = [over.lies[x] for x in given], [over.shapes[x] for x in given]
        if not is_list:
            now, shape = now[0], shape[0]
        found = spec.lies(now, shape, call.args[2:], over.ranks)  # type: ignore[union-attr, misc]
        if not isinstance(found, Placement):
            self._fail(
                node,
                f"{node.name} is given {name_of(given[0])}, which lies as {over.lies[given[0]]} "
                f"over {over.ranks} ranks; {found}.",
            )
        if isinstance(shape, list) and not is_list:  # one of several
            shape = shape[axis]
        chunks = num_chunks(over.ranks, over.zigzag)
        if isinstance(found, Cut) and not fits(shape, found, chunks):
            self._fail(node, f"{list(shape)} cannot be cut as {found} into {chunks} chunks.")
        over.note(node, found, shape)

    def _call(self, over: _Over, node: fx.Node, call: _Call, placed: Placed | None) -> None:
        tensors = tensors_of(node)
        if placed is None or placed.target is None:
            self._plain(over, node, call, tensors)
            return
        if info(node).is_random and any(over.lies[t] != R for t in tensors):
            self._fail(node, f"{node.name} draws for a part, and all ranks draw the same numbers.")
        whole = self._whole(over, node, placed)
        now = tuple(o.now for o in whole.operands)
        for way in ways(whole):
            is_met = all(map(serves, now, way.needs)) and way.gives == placed.gives
            if is_met and _is_local(way, whole, call, tensors):
                break
        else:
            told = ", ".join(f"{name_of(t)} {over.lies[t]}" for t in tensors)
            self._fail(
                node,
                f"{node.name} ({placed.target}) cannot give {placed.gives} of {told or 'nothing'} "
                f"over the {over.axis} axis: no rule has this way.",
            )
        if placed.is_same and placed.target in SAME_VALUES and not _is_identity(whole):
            self._fail(node, f"{node.name} is said to copy what it reads, and changes its form.")
        over.note(node, placed.gives, placed.shape)
        self._check_shape(over, node, placed)

    def _plain(self, over: _Over, node: fx.Node, call: _Call, tensors: Sequence[fx.Node]) -> None:
        """Check a call that a later pass added: it reads whole values, or copies one as it is."""
        if all(over.lies[t] == R for t in tensors):
            over.note_whole(node)
        elif (
            call.target in SAME_VALUES
            and len(tensors) == 1
            and over.local(node) == over.local(tensors[0])
        ):
            over.note_same(node, tensors[0])
        else:
            told = ", ".join(f"{name_of(t)} {over.lies[t]}" for t in tensors)
            self._fail(node, f"{node.name} reads {told}, and nothing says how.")

    def _whole(self, over: _Over, node: fx.Node, placed: Placed) -> WholeCall:
        operands = over.operands(tensors_of(node))
        if (due := _num_holes((placed.args, placed.kwargs))) != len(operands):
            self._fail(node, f"{node.name} reads {len(operands)} values, and its whole call {due}.")
        if placed.shape and isinstance(placed.shape[0], (tuple, type(None))):
            result: Any = [SimpleNamespace(shape=shape) for shape in placed.shape]
        else:
            result = SimpleNamespace(shape=placed.shape)
        hints = (placed.gives,) if isinstance(placed.gives, Cut) else ()
        return WholeCall(
            placed.target, placed.args, placed.kwargs, operands, result, over.ranks, hints,
            over.axis, over.zigzag,
        )  # fmt: skip

    def _check_shape(self, over: _Over, node: fx.Node, placed: Placed) -> None:
        local = over.local(node)
        if isinstance(value(node), torch.Tensor):
            whole = [(local, placed.shape, placed.gives)]
        else:
            whole = [
                (v, s, item(placed.gives, i))
                for i, (v, s) in enumerate(zip(local, placed.shape, strict=True))
            ]
        for made, shape, gives in whole:
            if made is not None and list(made) != local_shape(shape, gives, over.ranks):
                self._fail(
                    node,
                    f"{node.name} has shape {list(made)}; the part of {list(shape)} that "
                    f"lies as {gives} has {local_shape(shape, gives, over.ranks)}.",
                )

    def _results(self, node: fx.Node) -> list[Any]:
        kept: list[Any] = []
        specs = self.program.outputs[self.name]
        for spec, result in zip(specs, self.program.results(self.name), strict=True):
            is_value = isinstance(result, fx.Node)
            if spec.role is Role.SAVED:
                each = [
                    (over.lies[result], over.shapes[result]) if is_value else (R, ())
                    for over in self.axes
                ]
                kept.append((each, info(result).index if is_value else -1))
                continue
            if not is_value or spec.role is Role.SHARD_GRAD:
                continue
            for number, over in enumerate(self.axes):
                due, _ = self._sent_as(number, over, spec, result)
                if spec.role is Role.GRAD:
                    part = over.own_part(self.program.params[spec.name].part)
                    due = part.cut if part else over.due
                if over.lies[result] != due:
                    self._fail(
                        node,
                        f"{spec.role.value} {spec.name} lies as {over.lies[result]} over the "
                        f"{over.axis} axis; it must lie as {due}.",
                    )
        return kept

    def _sent_as(
        self, number: int, over: _Over, spec: OutputInfo, result: fx.Node
    ) -> tuple[Any, Any]:
        """Return the required placement of a result: that of its receiver, otherwise whole."""
        graph = {Role.OUTPUT: FORWARD, Role.INPUT_GRAD: BACKWARD}.get(spec.role)
        for wire in self.program.stage.wires:
            if (wire.graph, wire.source, wire.output) == (graph, self.position, spec.index):
                return self._wired(number, over, result, wire.lies)
        return R, ()


def _num_holes(argument: Any) -> int:
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, (list, tuple)):
        return sum(map(_num_holes, argument))
    return isinstance(argument, Hole)


def _is_local(way: Way, whole: WholeCall, call: _Call, tensors: Sequence[fx.Node]) -> bool:
    """Return whether a call is the one that a way prescribes for one rank."""
    spec = spec_of_target(call.target)
    name = spec.name if spec is not None and call.target is not whole.target else ""
    if name != way.op or (not name and call.target is not whole.target):
        return False
    args = way.args if way.args is not None else whole.args
    local = _plain_list(filled(args, tensors)), _plain_list(filled(whole.kwargs, tensors))
    mine = _plain_list(call.args), _plain_list(call.kwargs)
    return local == mine or by_name(call.target, *local) == by_name(call.target, *mine)


def by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that equal their defaults.

    Two calls that differ only in defaults that are written out are then equal.
    """
    names, defaults = _formal(target)
    given = {**dict(zip(names or map(str, range(len(args))), args, strict=False)), **kwargs}
    return {
        name: argument
        for name, argument in given.items()
        if name not in defaults or repr(argument) != repr(defaults[name])
    }


@functools.cache
def _formal(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments, and the defaults of those that have one."""
    schema = schema_of(target)
    formal = [] if schema is None else schema.arguments
    defaults = {a.name: _plain_list(a.default_value) for a in formal if a.has_default_value()}
    return tuple(a.name for a in formal), defaults


def _plain_list(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_plain_list(a) for a in argument]
    if isinstance(argument, dict):
        return {k: _plain_list(v) for k, v in argument.items()}
    return argument


def _is_identity(call: WholeCall) -> bool:
    """Return whether a view or copy has each element of its argument where that has it."""
    x = call.operand(0)
    if call.shape != x.shape:
        return False
    if call.target is not _aten.permute.default:
        return True
    dims = [d for d in (_dim(d, x.dim) for d in call.args[1]) if x.shape[d] != 1]
    return dims == sorted(dims)
