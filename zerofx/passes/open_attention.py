"""open-attention: write attention as ops that a ring of ranks can compute.

A captured call of torch's fused attention becomes `attention`, and its gradient
`attention_backward`, if no dropout is in it. A mask that is computed from constants alone and is
causal, or masks nothing, is not made at all: that is how transformers writes the causal mask. Any
other (of padding, a window, a bias) becomes an operand, of which each rank will have the rows of
its queries. Keys that were repeated for several heads of queries are given unrepeated, and the sums
of their repeated gradients are left out.

A mask of constants is evaluated here, in full, by stretches of rows: from positions to whatever the
model compares, a value costs as many elements as a stretch has. Attention that is not opened is
cut by heads, or gathered, which a warning says.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from zerofx import ops
from zerofx.compat.graphs import op_argument
from zerofx.ir.graphs import call
from zerofx.ir.meta import info, value
from zerofx.ir.program import Planned
from zerofx.ir.verify_values import args, digest
from zerofx.layout.placements import num_chunks
from zerofx.passes.base import Fact, Pass, Report
from zerofx.plan.parts import Parallel

log = logging.getLogger("zerofx")
_aten = torch.ops.aten
MOST_ELEMENTS = 1 << 24  # of a stretch of a mask, and of a constant that is needed whole


@dataclass(frozen=True)
class OpenAttention(Pass):
    """Replace attention by an op that keys can travel to, and take causal masks out."""

    name: ClassVar[str] = "open-attention"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})

    parallel: Parallel

    def run(self, program: Planned) -> Report:
        if not self.parallel.is_zigzag:
            return Report(False, "no ring")
        chunks = num_chunks(self.parallel.context, zigzag=True)
        opened = 0
        left: dict[str, str] = {}
        made: dict[str, None] = {}
        for gm in program.graphs.values():
            masks = Masks(gm)
            for node in list(gm.graph.nodes):
                if node.target not in _BACKWARD_OF:
                    continue
                found = _found(node, masks, chunks)
                if isinstance(found, str):
                    left[info(node).line] = found
                else:
                    _open(gm.graph, found)
                    opened += 1
                    if found.mask is not None:
                        made[found.said] = None
            if opened:
                gm.graph.eliminate_dead_code(is_impure_node=_stays)
        for line, reason in left.items():
            log.warning(
                "%s (%s): attention does not run around the ring of Plan.parallel.context = %d: %s."
                " It is cut by heads, or else gathered.",
                program.model_name, line, self.parallel.context, reason,
            )  # fmt: skip
        return Report(opened > 0, "; ".join([f"{opened} calls of attention", *made]))

    def options(self) -> dict[str, object]:
        return {"context": self.parallel.context, "attention": self.parallel.attention}


_BACKWARD_OF: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
    _aten._scaled_dot_product_flash_attention.default: (
        _aten._scaled_dot_product_flash_attention_backward.default
    ),
    _aten._scaled_dot_product_efficient_attention.default: (
        _aten._scaled_dot_product_efficient_attention_backward.default
    ),
    _aten._scaled_dot_product_cudnn_attention.default: (
        _aten._scaled_dot_product_cudnn_attention_backward.default
    ),
}
_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
_SAME = {_aten.detach.default, _aten.alias.default}


def _stays(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure() or info(node).is_random


# -- calls of attention ---------------------------------------------------------------------------
@dataclass(frozen=True)
class _Attention:
    """A captured call. backward: its gradient; None if the graph has none.

    keys, values: as they were before they were repeated. ends: the gradients of these. mask: if it
        must be made. said: why it must.
    """

    node: fx.Node
    backward: fx.Node | None
    query: fx.Node
    keys: fx.Node
    values: fx.Node
    ends: tuple[fx.Node | None, fx.Node | None]
    causal: bool
    scale: float
    mask: fx.Node | None
    said: str


def _found(node: fx.Node, masks: Masks, chunks: int) -> _Attention | str:
    """Return a call that can be opened, or the reason why it cannot."""
    query, keys, values = args(node)[:3]
    q, k = value(query), value(keys)
    if op_argument(node, "dropout_p"):
        return "it drops weights at random"
    if q.shape[2] % chunks or k.shape[2] % chunks:
        return f"{q.shape[2]} queries and {k.shape[2]} keys do not divide into {chunks} chunks"
    causal, mask = bool(op_argument(node, "is_causal")), _mask_of(node)
    said = False if mask is None else masks.says(mask)
    if isinstance(said, bool):
        causal, mask = causal or said, None
    elif mask is not None:
        mask = masks.first(mask)
    if node.target is not _target_of(q, mask):
        return f"the ring has no kernel for {node.target} in {q.dtype}"
    if causal and mask is not None:
        return "it has a mask and is causal besides"
    if causal and q.shape[2] != k.shape[2]:
        return f"its mask is causal over {q.shape[2]} queries and {k.shape[2]} keys"
    backward = _backward_of(node)
    if isinstance(backward, str):
        return backward
    if backward is not None and _wants_mask_gradient(backward):
        return "its mask has a gradient"
    scale = op_argument(node, "scale")
    before = _before_repeats(keys, values, backward)
    ends: tuple[fx.Node | None, fx.Node | None] = (None, None)
    if before is not None:
        keys, values, ends = before
    return _Attention(
        node, backward, query, keys, values, ends, causal,
        1 / math.sqrt(q.shape[3]) if scale is None else float(scale), mask, str(said),
    )  # fmt: skip


def _target_of(q: Tensor, mask: fx.Node | None) -> Any:
    """Return the operator that `runtime.ring` calls for such queries."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu.default
    if q.element_size() < 4 and mask is None:
        return _aten._scaled_dot_product_flash_attention.default
    return _aten._scaled_dot_product_efficient_attention.default


def _mask_of(node: fx.Node) -> fx.Node | None:
    if node.target is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return op_argument(node, "attn_mask")
    if node.target is _EFFICIENT:
        return op_argument(node, "attn_bias")
    return None


def _wants_mask_gradient(backward: fx.Node) -> bool:
    """Return whether a mask is trained; torch decomposes such attention, except on CUDA."""
    if backward.target is not _BACKWARD_OF[_EFFICIENT]:
        return False
    return bool(op_argument(backward, "grad_input_mask")[3])


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {user.args[1]: user for user in node.users}  # type: ignore[misc]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a value, also through detached aliases of it."""
    for user in node.users:
        if user.target in _SAME:
            yield from _readers(user)
        else:
            yield user


def _backward_of(node: fx.Node) -> fx.Node | str | None:
    """Return the call's gradient, None if it has none; or why the two cannot be replaced."""
    items = _items(node)
    rest = [user for index in items if index > 0 for user in _readers(items[index])]
    if not rest:
        return None
    backward, due = rest[0], _BACKWARD_OF[node.target]
    if backward.target is not due or any(user is not backward for user in rest):
        return "something else reads the sums of its exponentials"
    return backward


def _before_repeats(
    keys: fx.Node, values: fx.Node, backward: fx.Node | None
) -> tuple[fx.Node, fx.Node, tuple[fx.Node | None, fx.Node | None]] | None:
    """Return keys and values before each of their heads was repeated, and their gradients."""
    first, second = _unrepeated(keys), _unrepeated(values)
    if first is None or second is None or value(first).shape[1] != value(second).shape[1]:
        return None
    items = {} if backward is None else _items(backward)
    ends = [_summed(items[at]) if at in items else None for at in (1, 2)]
    for at, end, source in zip((1, 2), ends, (first, second), strict=True):
        if at in items and (end is None or value(end).shape != value(source).shape):
            return None
    return first, second, (ends[0], ends[1])


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """Return x [b, h, l, w] for x[:, :, None].expand(b, h, n, l, w).reshape(b, h * n, l, w)."""
    shape = tuple(value(node).shape)
    while node.target in _RESHAPED:
        node = args(node)[0]
    if node.target is not _aten.expand.default:
        return None
    wide, source = tuple(value(node).shape), args(node)[0]
    if len(wide) != 5 or source.target is not _aten.unsqueeze.default or args(source)[1] != 2:
        return None
    before: fx.Node = args(source)[0]
    batch, heads, times, length, width = wide
    is_right = shape == (batch, heads * times, length, width)
    return before if is_right and tuple(value(before).shape) == wide[:2] + wide[3:] else None


def _summed(node: fx.Node) -> fx.Node | None:
    """Return the sum over repeated heads of a gradient that nothing else reads."""
    for targets, shown in _SUMMED:
        users = list(node.users)
        if len(users) != 1 or users[0].target not in targets or not shown(users[0]):
            return None
        node = users[0]
    return node


_RESHAPED = {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.clone.default,
}  # fmt: skip
_SUMMED = (
    (_RESHAPED, lambda n: value(n).dim() == 5),
    ({_aten.sum.dim_IntList}, lambda n: list(n.args[1]) == [2] and n.args[2:] == (True,)),
    ({_aten.squeeze.dim}, lambda n: n.args[1] == 2),
)


def _open(graph: fx.Graph, found: _Attention) -> None:
    node, more = found.node, (found.causal, found.scale)
    if found.mask is not None:
        more = (*more, found.mask)  # type: ignore[assignment]
    args = (found.query, found.keys, found.values)
    forward = _made(graph, node, ops.attention, (*args, *more))
    items = {k: _taken(graph, node, forward, k) for k in (0, 1)}
    backward = found.backward
    if backward is not None:
        grad = backward.args[0]
        read = (grad, *args, items[0], items[1], *more)
        made = _made(graph, backward, ops.attention_backward, read)
        for k, given in _items(backward).items():
            end = given if k == 0 else found.ends[k - 1] or given
            item = _taken(graph, given, made, k)
            item.meta["val"] = value(made)[k]
            end.replace_all_uses_with(item)
    for k, given in _items(node).items():
        if k in items:
            given.replace_all_uses_with(items[k])
    for old in (backward, node):
        if old is not None:
            _erase(graph, old)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a call and what reads it: the results of all of it have been replaced."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _made(graph: fx.Graph, old: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with graph.inserting_before(old):
        made = call(graph, target, args)
    made.meta = {k: v for k, v in old.meta.items() if k != "val"} | {"val": made.meta["val"]}
    return made


def _taken(graph: fx.Graph, old: fx.Node, source: fx.Node, index: int) -> fx.Node:
    with graph.inserting_after(source):
        made = graph.call_function(operator.getitem, (source, index))
    kept = {k: v for k, v in old.meta.items() if k != "val"}
    made.meta = kept | {"val": value(source)[index]}
    return made


# -- masks ----------------------------------------------------------------------------------------
class _NotConstant(Exception):
    """A mask cannot be evaluated; the text completes "a mask ..."."""


@dataclass
class Masks:
    """What the masks of a graph say, as far as they are computed from constants.

    known: by the text of a mask's expression, which those of all layers share.
    """

    gm: fx.GraphModule
    known: dict[str, bool | str] = field(default_factory=dict)
    texts: dict[fx.Node, str] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    firsts: dict[str, fx.Node] = field(default_factory=dict)
    wholes: dict[str, Tensor] = field(default_factory=dict)

    def says(self, mask: fx.Node) -> bool | str:
        """Return whether a mask is causal or masks nothing; a text says why it must be made."""
        text = self._text(mask)
        if self.reasons[mask]:
            return f"a mask {self.reasons[mask]}"
        if text not in self.known:
            try:
                self.known[text] = self._evaluated(mask)
            except _NotConstant as error:
                self.known[text] = f"a mask {error}"
        return self.known[text]

    def first(self, mask: fx.Node) -> fx.Node:
        """Return the first mask that is computed as this one is: each layer writes its own."""
        return self.firsts.setdefault(self._text(mask), mask)

    def _text(self, node: fx.Node) -> str:
        """Return an expression's text; record why it is no constant, "" if it is one."""
        if node not in self.texts:
            reason = ""
            if node.op == "placeholder":
                text, reason = node.name, f"depends on {info(node).name}"
            elif info(node).is_random:
                text, reason = node.name, "is drawn at random"
            else:

                def named(operand: fx.Node) -> Any:
                    return _Named(self._text(operand))

                said = fx.node.map_arg((node.args, node.kwargs), named)
                text = digest(f"{node.target}{said}")
                reason = next(filter(None, (self.reasons[a] for a in node.all_input_nodes)), "")
            self.texts[node], self.reasons[node] = text, reason
        return self.texts[node]

    def _evaluated(self, mask: fx.Node) -> bool | str:
        *outer, rows, columns = value(mask).shape
        if columns * math.prod(outer) > MOST_ELEMENTS:
            raise _NotConstant(f"has {columns * math.prod(outer)} elements in each row")
        step = max(1, MOST_ELEMENTS // (4 * columns * math.prod(outer)))
        most = torch.finfo(value(mask).dtype).min
        is_causal, is_open = rows == columns, True  # one row for all queries is not causal
        for first in range(0, rows, step):
            last = min(first + step, rows)
            found = self._part(mask, [*((0, size) for size in outer), (first, last), (0, columns)])
            ahead = torch.ones(last - first, columns, dtype=torch.bool).triu(first + 1)
            is_open = is_open and bool((found == 0).all())
            is_causal = is_causal and bool(torch.where(ahead, found <= most, found == 0).all())
            if not (is_open or is_causal):
                return "a mask is neither causal nor without effect"
        return is_causal and not is_open

    def _part(self, node: fx.Node, ends: list[tuple[int, int]]) -> Tensor:
        """Return a range of a constant value, in each of its dimensions."""
        shape, target, given = value(node).shape, node.target, args(node)
        if target in _ELEMENTWISE:
            return self._called(target, *self._given((given, node.kwargs), shape, ends))
        source: Any = given[0] if given else None
        if target is _aten.unsqueeze.default:
            dim = given[1] % len(shape)
            return self._part(source, ends[:dim] + ends[dim + 1 :]).unsqueeze(dim)
        if target is _aten.expand.default:
            part = self._seen(source, shape, ends)
            return part.expand([last - first for first, last in ends])
        if target is _aten.index.Tensor and all(isinstance(i, fx.Node) for i in given[1]):
            indices = [self._seen(i, shape, ends) for i in given[1]]
            if len(indices) == value(source).dim():
                return self._whole(source)[tuple(indices)]
        return self._whole(node)[tuple(slice(first, last) for first, last in ends)]

    def _seen(self, node: fx.Node, shape: Any, ends: list[tuple[int, int]]) -> Tensor:
        """Return the range of an operand that is broadcast to `shape`."""
        own = value(node).shape
        ahead = len(shape) - len(own)
        read = [(0, 1) if own[d] == 1 else ends[d + ahead] for d in range(len(own))]
        return self._part(node, read)

    def _given(self, given: Any, shape: Any, ends: list[tuple[int, int]]) -> Any:
        return fx.node.map_arg(given, lambda n: self._seen(n, shape, ends))

    def _called(self, target: Any, given: Any, named: dict[str, Any]) -> Tensor:
        """Call an operator on the host, wherever its result would be."""
        host = torch.device("cpu")
        return target(*given, **{k: host if k == "device" else v for k, v in named.items()})

    def _whole(self, node: fx.Node) -> Tensor:
        """Return a whole constant value, which must be small."""
        text = self._text(node)
        if text not in self.wholes:
            if value(node).numel() > MOST_ELEMENTS:
                numel = value(node).numel()
                raise _NotConstant(f"is made of {node.name}, which has {numel} elements")
            if node.op == "get_attr":
                held: Any = self.gm
                for name in str(node.target).split("."):
                    held = getattr(held, name)
                if type(held) is not Tensor and not isinstance(held, torch.nn.Parameter):
                    raise _NotConstant(f"reads {node.target}, which has no values yet")
                self.wholes[text] = held.detach().cpu()
            else:
                given: Any = fx.node.map_arg((args(node), node.kwargs), self._whole)
                self.wholes[text] = self._called(node.target, *given)
        return self.wholes[text]


@dataclass(frozen=True)
class _Named:
    """An operand in the text of an expression."""

    text: str

    def __repr__(self) -> str:
        return self.text


_ELEMENTWISE = {
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.add.Scalar, _aten.sub.Scalar,
    _aten.mul.Scalar, _aten.rsub.Scalar, _aten.neg.default, _aten.clone.default,
    _aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.where.self,
    _aten.masked_fill.Scalar, _aten.eq.Tensor, _aten.eq.Scalar, _aten.ne.Tensor, _aten.ne.Scalar,
    _aten.le.Tensor, _aten.le.Scalar, _aten.lt.Tensor, _aten.lt.Scalar, _aten.ge.Tensor,
    _aten.ge.Scalar, _aten.gt.Tensor, _aten.gt.Scalar, _aten.bitwise_and.Tensor,
    _aten.bitwise_or.Tensor, _aten.bitwise_not.default, _aten.logical_and.default,
    _aten.logical_or.default, _aten.logical_not.default,
}  # fmt: skip
