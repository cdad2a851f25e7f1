"""The pattern of a linear layer followed by cross-entropy, with its gradients.

    logits = mm(hidden, t(weight))   or   addmm(bias, hidden, t(weight))
    x = logits through views and a cast to fp32
    loss, total = nll_loss_forward(_log_softmax(x, 1), target, None, mean or sum, ignore_index)

    g = _log_softmax_backward_data(nll_loss_backward(dloss, ...), ...) through views and a cast
    dweight = mm(t(g), hidden),   dhidden = mm(g, weight),   dbias = view(sum(g, [0], True))

There is no match if anything else reads the logits: a model that returns them (Plan(outputs="loss")
removes them), a model that shifts them after the linear layer, label smoothing, class weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zerofx.kernels import ops
from zerofx.passes.patterns.match import FusedCall, Match, Out
from zerofx.passes.patterns.nodes import (
    DTYPES,
    RESHAPES,
    args,
    aten,
    detached,
    dtype,
    is_call,
    is_widening,
    only_user,
    shape,
    users,
)


def find_losses(graph: fx.Graph) -> Iterator[Match]:
    """Yield the loss heads of a graph."""
    for node in graph.nodes:
        if is_call(node, aten.nll_loss_forward.default) and (head := _head(node)) is not None:
            match = _match(head)
            if match is not None:
                yield match


@dataclass
class _Head:
    """The forward half of a loss head."""

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    log_probs: fx.Node
    nll: fx.Node
    inside: set[fx.Node]

    @property
    def loss(self) -> fx.Node | None:
        return next((n for n in self.nll.users if n.args[1] == 0), None)

    @property
    def logits_shape(self) -> tuple[int, ...]:
        return shape(self.hidden)[0], shape(self.weight)[0]


@dataclass
class _Grads:
    """The backward half: its nodes, and the gradients that it computes."""

    inside: set[fx.Node] = field(default_factory=set)
    hidden: list[fx.Node] = field(default_factory=list)
    weight: list[fx.Node] = field(default_factory=list)
    bias: list[fx.Node] = field(default_factory=list)

    def results(self) -> dict[int, fx.Node] | None:
        """Return the gradients by index, or None if one was computed twice."""
        kinds = (self.hidden, self.weight, self.bias)
        if any(len(kind) > 1 for kind in kinds):
            return None
        return {at: kind[0] for at, kind in enumerate(kinds) if kind}


def _head(nll: fx.Node) -> _Head | None:
    log_probs, _, class_weights, reduction, _ = args(nll)
    if class_weights is not None or reduction not in (1, 2):
        return None
    if not is_call(log_probs, aten._log_softmax.default) or len(shape(log_probs)) != 2:
        return None
    x, dim, _ = args(log_probs)
    inside = {nll, log_probs, *users(nll, operator.getitem)}
    while is_call(x, *RESHAPES) or is_widening(x):
        inside.add(x)
        x = x.args[0]
    if dim not in (1, -1) or x.kwargs:
        return None
    if not is_call(x, aten.mm.default, aten.addmm.default):
        return None
    bias, hidden, transposed = (None, *x.args) if is_call(x, aten.mm.default) else x.args
    if not is_call(transposed, aten.t.default):
        return None
    weight = transposed.args[0]
    if dtype(hidden) not in DTYPES or shape(log_probs) != (shape(hidden)[0], shape(weight)[0]):
        return None
    if bias is not None and len(shape(bias)) != 1:
        return None
    return _Head(hidden, weight, bias, log_probs, nll, {*inside, x})


def _match(head: _Head) -> Match | None:
    _, target, _, reduction, ignore_index = args(head.nll)
    options = (ignore_index, reduction == 1, 0.0)
    given = (head.hidden, head.weight, head.bias, target)
    if head.loss is None:
        return None
    forward = FusedCall(
        ops.linear_cross_entropy, (*given, *options), {0: head.loss}, like=head.log_probs
    )
    backward = users(head.log_probs, aten.nll_loss_backward.default)
    if not backward:
        return Match((forward,), frozenset(head.inside))
    grads = _grads(head, backward[0])
    results = grads.results() if grads is not None and len(backward) == 1 else None
    if grads is None or not results:
        return None
    needs = (bool(grads.hidden), bool(grads.weight or grads.bias))
    back = FusedCall(
        ops.linear_cross_entropy_backward,
        (backward[0].args[0], *given, Out(0, 1), *needs, *options),
        results,
        like=next(iter(results.values())),
    )
    return Match((forward, back), frozenset(head.inside | grads.inside))


def _grads(head: _Head, nll_backward: fx.Node) -> _Grads | None:
    softmax_backward = only_user(nll_backward, aten._log_softmax_backward_data.default)
    if softmax_backward is None:
        return None
    copies = detached(head.log_probs)
    if softmax_backward.args[1] not in (head.log_probs, *copies):
        return None
    found = _Grads({nll_backward, softmax_backward, *copies})
    g = softmax_backward
    while (behind := only_user(g, *RESHAPES, aten._to_copy.default)) is not None:
        found.inside.add(behind)
        g = behind
    if shape(g) != head.logits_shape:
        return None
    return found if all(_take(head, found, g, user) for user in g.users) else None


def _take(head: _Head, found: _Grads, g: fx.Node, user: fx.Node) -> bool:
    """Record the gradient that a reader of the logits' gradient computes; False if unknown."""
    found.inside.add(user)
    if is_call(user, aten.mm.default) and user.args[0] is g:
        found.hidden.append(user)
        return _origin(user.args[1]) is head.weight and shape(user.args[1]) == shape(head.weight)
    if is_call(user, aten.t.default):
        product = only_user(user, aten.mm.default)
        if product is None or product.args != (user, head.hidden):
            return False
        found.inside.add(product)
        found.weight.append(product)
        return True
    if is_call(user, aten.sum.dim_IntList) and user.args[1] == [0] and head.bias is not None:
        flat = only_user(user, *RESHAPES)
        if flat is None or shape(flat) != shape(head.bias):
            return False
        found.inside.add(flat)
        found.bias.append(flat)
        return True
    return False


def _origin(node: Any) -> Any:
    """Return the source of a chain of transpositions."""
    while is_call(node, aten.t.default):
        node = node.args[0]
    return node
