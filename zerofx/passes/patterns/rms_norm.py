"""The RMSNorm pattern, with the residual sums around it and its gradients.

The form is that of Llama and torch.nn.RMSNorm, with casts only if x is narrower than fp32:

    w = fp32(x),   r = rsqrt(mean(w^2) + eps),   n = w * r,   y = weight * n
    dweight = view(sum over rows of dy * n),   a = fp32(dy * weight)
    dx = a * r  +  expand(sum(a * w) * -0.5 * r^3) / D * (2 * w^1)

The two summands of dx are added one after the other to the gradient of the residual stream, which
then becomes an argument (`grad_sum`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.ir.meta import Phase, info
from zerofx.kernels import ops
from zerofx.passes.patterns.match import FusedCall, Match, Out
from zerofx.passes.patterns.nodes import (
    DTYPES,
    RESHAPES,
    args,
    aten,
    behind_sum,
    detached,
    dtype,
    is_call,
    is_widening,
    only_user,
    other,
    plain_sum,
    products,
    residual_of,
    shape,
    users,
)

_copy = aten._to_copy.default


def find_rms_norms(graph: fx.Graph) -> Iterator[Match]:
    """Yield the RMS norms of a graph."""
    for node in graph.nodes:
        if is_call(node, aten.rsqrt.default) and (norm := _forward(node)) is not None:
            match = _rms_norm(norm)
            if match is not None:
                yield match


@dataclass
class _Norm:
    """The forward half: `wide` is x in fp32, `scaled` is multiplied by the weight."""

    x: fx.Node
    wide: fx.Node
    rsqrt: fx.Node
    normal: fx.Node
    scaled: fx.Node
    weight: fx.Node
    y: fx.Node
    eps: float
    inside: set[fx.Node]


def _forward(rsqrt: fx.Node) -> _Norm | None:
    shifted: Any = rsqrt.args[0]
    if not is_call(shifted, aten.add.Tensor, aten.add.Scalar) or shifted.kwargs:
        return None
    mean, eps = shifted.args
    if not is_call(mean, aten.mean.dim) or not isinstance(eps, float):
        return None
    square, dims, *keep = mean.args
    last = len(shape(square)) - 1
    if not is_call(square, aten.pow.Tensor_Scalar) or square.args[1] != 2 or keep != [True]:
        return None
    wide = square.args[0]
    if dims not in ([-1], [last]) or dtype(wide) is not torch.float32:
        return None
    x = wide.args[0] if is_widening(wide) and dtype(wide.args[0]) in DTYPES else wide
    inside = {rsqrt, shifted, mean, square, *([wide] if x is not wide else [])}
    normal = next((p for p, operand in products(rsqrt) if operand is wide), None)
    if normal is None:
        return None
    narrow = users(normal, _copy)
    scaled = narrow[0] if narrow else normal
    weighted = [
        (p, w) for p, w in products(scaled) if len(shape(w)) == 1 and shape(w)[0] == shape(x)[-1]
    ]
    if len(weighted) != 1 or len(narrow) > 1:
        return None
    y, weight = weighted[0]
    inside |= {normal, scaled, y}
    if dtype(y) != dtype(x):  # the weight is applied in fp32, and the result rounded
        rounded = only_user(y, _copy)
        if rounded is None or dtype(rounded) != dtype(x):
            return None
        y = rounded
        inside.add(y)
    return _Norm(x, wide, rsqrt, normal, scaled, weight, y, eps, inside)


def _rms_norm(norm: _Norm) -> Match | None:
    residual = residual_of(norm.x, norm.rsqrt)
    given = (*(residual or (norm.x, None)), norm.weight, norm.eps)
    results = {0: norm.y} | ({1: norm.x} if residual else {})
    forward = FusedCall(ops.rms_norm, given, results, like=norm.rsqrt)
    inside = set(norm.inside) | ({norm.x} if residual else set())
    behind = [n for n in norm.rsqrt.users if info(n).phase is Phase.BACKWARD]
    if not behind:
        return Match((forward,), frozenset(inside))
    found = _backward(norm)
    if found is None:
        return None
    s: Any = Out(0, 1) if residual else norm.x
    call = FusedCall(
        ops.rms_norm_backward,
        (found.dy, s, norm.weight, Out(0, 2), found.grad_sum),
        {0: found.total} | ({1: found.dweight} if found.dweight is not None else {}),
        like=found.like,
    )
    return Match((forward, call), frozenset(inside | found.inside))


@dataclass
class _Back:
    """The backward half; `total` is dx, or its sum with `grad_sum`."""

    dy: fx.Node
    total: fx.Node
    grad_sum: Any
    dweight: fx.Node | None
    like: fx.Node
    inside: set[fx.Node]


def _backward(norm: _Norm) -> _Back | None:
    straight = [(p, a) for p, a in products(norm.rsqrt) if p is not norm.normal]
    if len(straight) != 1:
        return None
    first, a = straight[0]
    curved = _curved(norm, a)
    if curved is None:
        return None
    second, inside = curved
    inside |= {first, a}
    weighted = args(a)[0] if is_widening(a) else a
    inside.add(weighted)
    dy = other(weighted, norm.weight) if is_call(weighted, aten.mul.Tensor) else None
    if dy is None:
        return None
    dweight = _weight_gradient(norm, dy, inside)
    sums = _sums(norm, first, second, inside)
    if sums is None:
        return None
    if is_widening(dy) and all(u in inside for u in dy.users):
        inside.add(dy)
        dy = args(dy)[0]
    return _Back(dy, *sums, dweight, first, inside)


def _curved(norm: _Norm, a: fx.Node) -> tuple[fx.Node, set[fx.Node]] | None:
    """Return the summand of dx that goes through the mean, and the nodes that compute it."""
    chain: list[fx.Node | None] = [next((p for p, o in products(a) if o is norm.wide), None)]
    for target in (aten.sum.dim_IntList, aten.mul.Scalar, aten.mul.Tensor, aten.expand.default,
                   aten.div.Scalar, aten.mul.Tensor):  # fmt: skip
        chain.append(only_user(chain[-1], target) if chain[-1] is not None else None)
    product, total, halved, cubed, spread, mean, result = chain
    if product is None or total is None or halved is None or cubed is None or spread is None:
        return None
    if mean is None or result is None:
        return None
    width, last = shape(norm.x)[-1], len(shape(norm.x)) - 1
    cube, double = other(cubed, halved), other(result, mean)
    copies = detached(norm.rsqrt)
    is_known = (
        total.args[1] == [last]
        and halved.args[1] == -0.5
        and mean.args[1] == width
        and is_call(cube, aten.pow.Tensor_Scalar)
        and cube.args[0] in (norm.rsqrt, *copies)
        and cube.args[1] == 3
        and is_call(double, aten.mul.Scalar)
        and double.args[1] == 2.0
        and is_call(double.args[0], aten.pow.Tensor_Scalar)
        and double.args[0].args == (norm.wide, 1.0)
    )
    nodes = {product, total, halved, cubed, spread, mean, cube, double, result, *copies}
    return (result, {*nodes, double.args[0]}) if is_known else None


def _weight_gradient(norm: _Norm, dy: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    """Return dweight and add its nodes to `inside`; return None if dweight is not computed."""
    product = next((p for p, operand in products(norm.scaled) if operand is dy), None)
    total = only_user(product, aten.sum.dim_IntList) if product is not None else None
    flat = only_user(total, *RESHAPES) if total is not None else None
    if product is None or total is None or flat is None or shape(flat) != shape(norm.weight):
        return None
    inside |= {product, total, flat}
    if dtype(flat) != dtype(norm.weight):
        rounded = only_user(flat, _copy)
        if rounded is not None and dtype(rounded) == dtype(norm.weight):
            inside.add(rounded)
            return rounded
    return flat


def _sums(
    norm: _Norm, first: fx.Node, second: fx.Node, inside: set[fx.Node]
) -> tuple[fx.Node, Any] | None:
    """Return (total, grad_sum): the sum that contains both summands of dx, and its third summand.

    Nodes of the sums are added to `inside`.
    """
    one, two = only_user(first, aten.add.Tensor), only_user(second, aten.add.Tensor)
    if one is None or two is None or not plain_sum(one) or not plain_sum(two):
        return None
    inside |= {second, one, two}
    if one is not two:  # the stream, plus one, plus two
        early, late = (one, two) if one < two else (two, one)
        if only_user(early, aten.add.Tensor) is not late:
            return None
        return late, other(early, first if early is one else second)
    total = one
    if norm.x is not norm.wide:
        narrow = only_user(total, _copy)
        if narrow is None or dtype(narrow) != dtype(norm.x):
            return None
        inside.add(narrow)
        total = narrow
    total, grad_sum, extra = behind_sum(total)
    inside |= extra
    return total, grad_sum
