"""Aliases: whether a region's results are new tensors, views of an input, or that input itself."""

from __future__ import annotations

import operator
from typing import Any

import torch

from zerofx.compat.graphs import OpOverload

# Result, input whose memory it shares, whether it is that input itself.
Alias = tuple[int, int, bool]


def results_in_inputs(graph: torch.fx.Graph) -> list[Alias] | None:
    """Return the results of a graph that share memory with its inputs.

    Returns None if running the graph does more than compute its results: an input is written to, or
    an op may or may not return a view.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    if any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in calls):
        return None
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    found: list[Alias] = []
    results: Any = graph.output_node().args[0]
    for at, result in enumerate(results):
        source = result
        while source.op == "call_function" and is_view(source.target):
            if _is_undecided(source.target):
                return None
            source = source.args[0]
        if source.op == "placeholder":
            found.append((at, inputs.index(source), source is result))
    return found


def is_tensor_call(target: Any) -> bool:
    """Return whether a call computes or views tensors, rather than computing a size from sizes."""
    if target is operator.getitem or not callable(target):
        return True
    name = getattr(target, "__name__", "")
    is_arithmetic = getattr(target, "__module__", "") == "_operator"
    return not is_arithmetic and not name.startswith(("sym_", "_sym_"))


def is_view(target: Any) -> bool:
    """Return whether a call only views its argument (or takes a tuple apart)."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return all(r.alias_info and not r.alias_info.is_write for r in target._schema.returns)


def _is_undecided(target: Any) -> bool:
    """Return whether an op is a composite that may or may not copy (`reshape`, `contiguous`)."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(target, OpOverload) and target.has_kernel_for_dispatch_key(key)
