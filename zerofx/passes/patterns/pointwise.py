"""The patterns of gated activations and of rotary embeddings, each with its gradients.

    y = act(gate) * up                                               act: silu or gelu
    dup = dy * act(gate),   dgate = act_backward(dy * up, gate)

    y = x * cos + cat([-x[D/2:], x[:D/2]]) * sin                     halves of the last dimension
    dx = slice_backward(-a[:D/2], D/2:) + slice_backward(a[D/2:], :D/2) + dy * cos,   a = dy * sin

A rotary embedding's backward reads nothing of its forward, so each is a match of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from zerofx.kernels import ops
from zerofx.passes.patterns.match import FusedCall, Match
from zerofx.passes.patterns.nodes import (
    DTYPES,
    args,
    aten,
    dtype,
    is_call,
    only_user,
    plain_sum,
    products,
    shape,
)

_BACKWARD: dict[Any, Any] = {
    aten.silu.default: aten.silu_backward.default,
    aten.gelu.default: aten.gelu_backward.default,
}


def find_gated(graph: fx.Graph) -> Iterator[Match]:
    """Yield the gated activations of a graph."""
    for node in graph.nodes:
        if is_call(node, *_BACKWARD) and dtype(node) in DTYPES:
            match = _gated(node)
            if match is not None:
                yield match


def _gated(act: fx.Node) -> Match | None:
    gate: Any = act.args[0]
    found = [(node, up) for node, up in products(act) if shape(up) == shape(act)]
    if not found:
        return None
    (y, up), backward = found[0], found[1:]
    approximate = act.kwargs.get("approximate", "none")
    activation = "silu" if is_call(act, aten.silu.default) else "gelu"
    activation += "_tanh" if approximate == "tanh" else ""
    forward = FusedCall(ops.gated_activation, (gate, up, activation), {0: y}, like=y)
    if dtype(up) != dtype(gate) or len(act.users) != len(found) or len(backward) > 1:
        return None
    if not backward:
        return Match((forward,), frozenset({act, y}))
    dup, dy = backward[0]
    inner = [node for node, operand in products(up) if operand is dy]
    if len(inner) != 1:
        return None
    dgate = only_user(inner[0], _BACKWARD[act.target])
    if dgate is None or dgate.args != (inner[0], gate) or dgate.kwargs != act.kwargs:
        return None
    given = (dy, gate, up, activation)
    back = FusedCall(ops.gated_activation_backward, given, {0: dgate, 1: dup}, like=dup)
    return Match((forward, back), frozenset({act, y, dup, inner[0], dgate}))


# -- rotary embeddings -----------------------------------------------------------------------------
def find_rotary(graph: fx.Graph) -> Iterator[Match]:
    """Yield the rotary embeddings of a graph, and their backwards."""
    for node in graph.nodes:
        if plain_sum(node) and len(shape(node)) == 4 and dtype(node) in DTYPES:
            match = _rotary(node) or _rotary_backward(node)
            if match is not None:
                yield match


def _rotary(y: fx.Node) -> Match | None:
    straight, turned = args(y)
    if not is_call(straight, aten.mul.Tensor) or not is_call(turned, aten.mul.Tensor):
        return None
    (x, cos), (halves, sin) = straight.args, turned.args
    if not is_call(halves, aten.cat.default) or not _is_last(halves.args[1:], y):
        return None
    negative, first = halves.args[0] if len(halves.args[0]) == 2 else (None, None)
    if not is_call(negative, aten.neg.default):
        return None
    second, half = negative.args[0], shape(y)[-1] // 2
    if not (_is_slice(first, x, 0, half) and _is_slice(second, x, half, shape(y)[-1])):
        return None
    if not _turns(cos, sin, y):
        return None
    inside = {straight, turned, halves, negative, first, second, y}
    return Match(
        (FusedCall(ops.rotary_embedding, (x, cos, sin), {0: y}, like=y),), frozenset(inside)
    )


def _rotary_backward(dx: fx.Node) -> Match | None:
    scattered, straight = args(dx)
    if not plain_sum(scattered) or not is_call(straight, aten.mul.Tensor):
        return None
    dy, cos = straight.args
    above, below = scattered.args
    half, width = shape(dx)[-1] // 2, shape(dx)[-1]
    if not (_is_scatter(above, half, width) and _is_scatter(below, 0, half)):
        return None
    negative, second = above.args[0], below.args[0]
    if not is_call(negative, aten.neg.default):
        return None
    first = negative.args[0]
    turned = first.args[0] if is_call(first, aten.slice.Tensor) else None
    if not is_call(turned, aten.mul.Tensor) or turned.args[0] is not dy:
        return None
    if not (_is_slice(first, turned, 0, half) and _is_slice(second, turned, half, width)):
        return None
    sin = turned.args[1]
    if not _turns(cos, sin, dx):
        return None
    inside = {scattered, straight, above, below, negative, first, second, turned, dx}
    back = FusedCall(ops.rotary_embedding_backward, (dy, cos, sin), {0: dx}, like=straight)
    return Match((back,), frozenset(inside))


def _turns(cos: Any, sin: Any, x: fx.Node) -> bool:
    """Return whether cosines and sines are [B or 1, 1, S, D] in the dtype of x."""
    batch, _, length, width = shape(x)
    forms = {(batch, 1, length, width), (1, 1, length, width)}
    return width % 2 == 0 and all(shape(t) in forms and dtype(t) == dtype(x) for t in (cos, sin))


def _is_last(dims: tuple[Any, ...], node: fx.Node) -> bool:
    return dims in ((-1,), (len(shape(node)) - 1,))


def _is_slice(node: Any, of: Any, start: int, end: int) -> bool:
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not of or len(node.args) != 4:
        return False
    _, dim, begin, stop = node.args
    width = shape(of)[-1]
    return _is_last((dim,), of) and begin == start and min(stop, width) == end


def _is_scatter(node: Any, start: int, end: int) -> bool:
    if not is_call(node, aten.slice_backward.default):
        return False
    _, sizes, dim, begin, stop, step = node.args
    return dim in (-1, len(sizes) - 1) and (begin, min(stop, sizes[-1]), step) == (start, end, 1)
