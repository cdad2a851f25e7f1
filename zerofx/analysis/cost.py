"""What a node costs on a machine: a roofline over its operations and the bytes that it moves."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zerofx.compat.flops import counted_flops
from zerofx.compat.graphs import pytree
from zerofx.ir.graphs import is_alias
from zerofx.ir.meta import nbytes, value
from zerofx.machine import Machine
from zerofx.runtime.kernels.ops import FUSED

_US = 1e6  # microseconds a second


def node_us(node: fx.Node, machine: Machine) -> float:
    """Return the microseconds of one node: the longer of its arithmetic and its memory traffic.

    Views and getitems take nothing.
    """
    if node.op != "call_function" or node.target is operator.getitem or is_alias(node):
        return 0.0
    moved = nbytes(value(node)) + sum(nbytes(value(n)) for n in node.all_input_nodes)
    arithmetic = node_flops(node) / machine.dense_flops_per_s
    return _US * max(arithmetic, moved / machine.memory_bytes_per_s)


def node_flops(node: fx.Node) -> float:
    """Return the operations of a node's matrix products; pointwise work counts as traffic only."""
    if node.target in FUSED:
        return _of_products(node)
    args, kwargs = pytree.tree_map(_value, (node.args, node.kwargs))
    known = counted_flops(node.target, args, kwargs, value(node))
    if known is not None:
        return known
    return _of_attention(node) if "attention" in str(node.target) else 0.0


def _value(argument: Any) -> Any:
    return value(argument) if isinstance(argument, fx.Node) else argument


def _of_attention(node: fx.Node) -> float:
    """Two products forward, five backward, over query and key lengths (heads x queries x keys)."""
    tensors = [v for n in node.all_input_nodes if isinstance(v := value(n), torch.Tensor)]
    full = [t for t in tensors if t.dim() == 4]
    if len(full) < 3:
        return 0.0
    is_backward = "backward" in str(node.target)
    query, key = (full[1], full[2]) if is_backward else (full[0], full[1])
    products = 5 if is_backward else 2
    return products * 2.0 * query.numel() * key.shape[-2]


def _of_products(node: fx.Node) -> float:
    """A fused loss head multiplies rows by its weight, three times as often in backward."""
    if "cross_entropy" not in str(node.target):
        return 0.0
    matrices = [v for n in node.all_input_nodes if isinstance(v := value(n), torch.Tensor)]
    hidden, weight = [t for t in matrices if t.dim() == 2][:2]
    times = 3 if "grads" in str(node.target) or "backward" in str(node.target) else 1
    return times * 2.0 * hidden.numel() * weight.shape[0]
