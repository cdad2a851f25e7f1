"""The LayerNorm pattern, with the residual sums around it.

In ATen the norm itself is already a pair of nodes. The fused parts are the sum before it and, after
its backward, the sum with the gradient of the residual stream.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from zerofx.kernels import ops
from zerofx.passes.patterns.match import FusedCall, Match, Out
from zerofx.passes.patterns.nodes import (
    DTYPES,
    args,
    aten,
    behind_sum,
    dtype,
    is_call,
    residual_of,
    users,
)


def find_layer_norms(graph: fx.Graph) -> Iterator[Match]:
    """Yield the layer norms of a graph that normalise one dimension and have weight and bias."""
    for node in graph.nodes:
        if is_call(node, aten.native_layer_norm.default) and (match := _layer_norm(node)):
            yield match


def _layer_norm(norm: fx.Node) -> Match | None:
    x, dims, weight, bias, eps = args(norm)
    if len(dims) != 1 or weight is None or bias is None or dtype(x) not in DTYPES:
        return None
    items = {args(n)[1]: n for n in users(norm, operator.getitem)}
    y, mean = items[0], items.get(1)
    residual = residual_of(x, norm)
    given = (*(residual or (x, None)), weight, bias, eps)
    results = {0: y} | ({1: x} if residual else {})
    forward = FusedCall(ops.layer_norm, given, results, like=norm)
    inside = {norm, *items.values(), *([x] if residual else [])}
    backward = users(mean, aten.native_layer_norm_backward.default) if mean is not None else []
    if not backward:
        return Match((forward,), frozenset(inside))
    back = backward[0]
    parts = {args(n)[1]: n for n in users(back, operator.getitem)}
    if len(backward) > 1 or 0 not in parts:
        return None
    total, grad_sum, extra = behind_sum(parts[0])
    s: Any = Out(0, 1) if residual else x
    call = FusedCall(
        ops.layer_norm_backward,
        (back.args[0], s, weight, Out(0, 2), Out(0, 3), grad_sum),
        {0: total} | {at: n for at, n in parts.items() if at > 0},
        like=back,
    )
    return Match((forward, call), frozenset({*inside, back, *parts.values(), *extra}))
