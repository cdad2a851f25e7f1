"""Operators: whether a result is new, a view or written over an argument, and fast calls."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from zerofx.compat.graphs import OpOverload, argument_names, op_name

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


@functools.cache
def in_place(target: Any) -> OpOverload | None:
    """Return the operator that writes a pointwise operator's result over its first argument."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    space, name, overload = op_name(target)
    if (
        space != "aten"
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return None
    found = getattr(getattr(torch.ops.aten, f"{name}_", None), overload, None)
    if found is None or argument_names(found) != argument_names(target):
        return None
    return found  # type: ignore[no-any-return]


@functools.cache
def out_of_place(target: Any) -> Any:
    """Return the operator that computes the same as a new value, if `in_place` gives the target.

    Other targets are returned as they are.
    """
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return target
    space, name, overload = op_name(target)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if space == "aten" else None
    found = getattr(packet, overload, None)
    return found if found is not None and in_place(found) is target else target


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


# -- the functions of torch's C module that call one operator each ---------------------------------
# A call through torch.ops matches its arguments with the operator's schema each time, which takes 2
# to 3 microseconds more than the generated binding (add: 5.6 and 1.9). 500 calls of a step take 1
# ms less.

# With the arguments that an emitted call gives, each calls this overload, and nothing else.
FUNCTIONS = (
    "_adaptive_avg_pool2d.default", "_log_softmax.default", "_log_softmax_backward_data.default",
    "_softmax.default", "_softmax_backward_data.default", "abs.default", "add.Tensor",
    "addmm.default", "avg_pool2d.default", "baddbmm.default", "bmm.default", "cat.default",
    "clone.default", "convolution.default", "cos.default", "div.Tensor", "embedding.default",
    "eq.Tensor", "exp.default", "gelu.default", "index_select.default",
    "leaky_relu.default", "log.default", "masked_fill.Scalar",
    "max_pool2d_with_indices.default", "mean.dim", "mm.default", "mul.Tensor",
    "native_batch_norm.default", "native_group_norm.default", "native_layer_norm.default",
    "neg.default", "permute.default", "reciprocal.default",
    "relu.default", "rsqrt.default", "select.int", "sigmoid.default", "silu.default",
    "sin.default", "split.Tensor", "sqrt.default", "squeeze.dim", "stack.default", "sub.Tensor",
    "sum.dim_IntList", "t.default", "tanh.default", "transpose.int", "unbind.int",
    "unsqueeze.default", "where.self",
)  # fmt: skip
METHODS = (
    "add_.Tensor", "detach.default", "div_.Tensor", "exp_.default", "expand.default",
    "masked_fill_.Scalar", "mul_.Tensor", "neg_.default", "relu_.default", "sigmoid_.default",
    "sub_.Tensor", "tanh_.default", "view.default",
)  # fmt: skip
_HOMES = (torch._C._VariableFunctions, torch._C._nn)


def binding(operator: str) -> Callable[..., Any] | None:
    """Return the binding of an overload such as "mm.default", or None if torch has none."""
    name = operator.partition(".")[0]
    homes = _HOMES if operator in FUNCTIONS else (torch._C.TensorBase,)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


class _Packet:
    """The overloads of an operator, by name: a binding if there is one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> Any:
        operator = f"{self._name}.{overload}"
        is_bound = operator in FUNCTIONS or operator in METHODS
        found: Any = binding(operator) if is_bound else None
        if found is None:
            found = getattr(getattr(torch.ops.aten, self._name), overload)
        setattr(self, overload, found)
        return found


class _Namespace:
    """Takes the place of torch.ops.aten in code that only calls operators."""

    def __getattr__(self, name: str) -> _Packet:
        packet = _Packet(name)
        setattr(self, name, packet)
        return packet


ATEN = _Namespace()
