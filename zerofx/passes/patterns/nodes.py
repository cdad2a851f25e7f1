"""Queries on nodes that the patterns of the pass `fuse` share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.meta import Phase, info, value

aten = torch.ops.aten

RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default,
})  # fmt: skip
# the kernels support these formats; float64 is left unfused
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def users(node: fx.Node, *targets: Any) -> list[fx.Node]:
    return [u for u in node.users if is_call(u, *targets)]


def only_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    """Return the only reader of a node if it calls one of `targets`, or else None."""
    found = list(node.users)
    return found[0] if len(found) == 1 and is_call(found[0], *targets) else None


def args(node: fx.Node) -> Any:
    """Return a node's arguments; the op's schema defines their meaning."""
    return node.args


def other(node: fx.Node, known: Any) -> Any:
    """Return the operand of a binary node that is not `known`, or None if neither is."""
    a, b = args(node)[:2]
    return b if a is known else a if b is known else None


def products(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (product, other operand) of each multiplication by another tensor."""
    for user in users(node, aten.mul.Tensor):
        operand = other(user, node)
        if isinstance(operand, fx.Node):
            yield user, operand


def detached(node: fx.Node) -> list[fx.Node]:
    """Return the chains of detach nodes that read a node."""
    found: list[fx.Node] = []
    todo = users(node, aten.detach.default)
    while todo:
        found.append(todo.pop())
        todo += users(found[-1], aten.detach.default)
    return found


def shape(node: Any) -> tuple[int, ...]:
    val = value(node) if isinstance(node, fx.Node) else None
    return tuple(val.shape) if isinstance(val, Tensor) else ()


def dtype(node: fx.Node) -> torch.dtype:
    found: torch.dtype = value(node).dtype
    return found


def is_widening(node: fx.Node) -> bool:
    """Return whether a node is a cast to fp32 and nothing else."""
    return is_call(node, aten._to_copy.default) and node.kwargs.get("dtype") is torch.float32


def plain_sum(node: fx.Node | None) -> bool:
    """Return whether a node adds two tensors of equal shape and dtype, unscaled."""
    if node is None or not is_call(node, aten.add.Tensor) or node.kwargs:
        return False
    summands = [a for a in node.args if isinstance(a, fx.Node)]
    return len(summands) == 2 and all(
        shape(a) == shape(node) and dtype(a) == dtype(node) for a in summands
    )


def residual_of(x: Any, norm: fx.Node) -> tuple[Any, ...] | None:
    """Return the summands of a norm's input, if the sum belongs to it."""
    if plain_sum(x) and info(x).unit == info(norm).unit and info(x).phase is Phase.FORWARD:
        return tuple(x.args)
    return None


def behind_sum(dx: fx.Node) -> tuple[fx.Node, Any, set[fx.Node]]:
    """Return (sum, other summand, nodes) if only the residual gradient's sum reads dx."""
    total = only_user(dx, aten.add.Tensor)
    if total is None or not plain_sum(total) or total.args[0] is total.args[1]:
        return dx, None, set()
    return total, other(total, dx), {total}
