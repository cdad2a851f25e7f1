"""Strides of results: those that a graph was captured with, on ATen and in Inductor.

Most fake kernels are decompositions, whose strides follow from the arithmetic they use. The
operator itself may return contiguous memory, or follow another argument. A graph captured with the
wrong strides has views that fail when it runs. `TrueStrides` corrects the strides of CPU operators.

Inductor decomposes operators while it compiles, and so changes strides within a captured graph.
`keep_strides` makes the graph's views copy if necessary, and gives its results the original
strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx.compat.operators import is_view

aten = torch.ops.aten
Strides = tuple[int, ...]
_Rule = Callable[[Tensor, Sequence[Any]], Strides]  # a result, the call's arguments


def _dense(made: Tensor, _: Sequence[Any]) -> Strides:
    return torch.empty(made.shape, device="meta").stride()


def _elementwise(made: Tensor, args: Sequence[Any]) -> Strides:
    """Return the strides of a pointwise operator on these tensors, in the order of its schema."""
    given = [a for a in args if isinstance(a, Tensor)]
    return tuple(compute_elementwise_output_strides(*given))


def _in_format_of(position: int) -> _Rule:
    """Return the rule for results that are contiguous or channels last, like an argument."""

    def rule(made: Tensor, args: Sequence[Any]) -> Strides:
        form = suggest_memory_format(args[position])
        return torch.empty(made.shape, device="meta", memory_format=form).stride()

    return rule


# Operators whose fake kernel is wrong on a CPU, with the rule for their first result (the first two
# for log_sigmoid_forward). tests/compat/test_strides.py compares them with the real operators.
_RULES: dict[Any, _Rule] = {
    aten._log_softmax_backward_data.default: _dense,
    aten.binary_cross_entropy.default: _elementwise,
    aten.elu_backward.default: _elementwise,
    aten.floor_divide.default: _elementwise,
    aten.glu_backward.default: _dense,
    aten.hardsigmoid_backward.default: _elementwise,
    aten.hardswish_backward.default: _elementwise,
    aten.hardtanh_backward.default: _elementwise,
    aten.huber_loss_backward.default: _dense,
    aten.log_sigmoid_forward.default: _dense,
    aten.logit_backward.default: _elementwise,
    aten.mse_loss_backward.default: _dense,
    aten.native_batch_norm.default: _in_format_of(0),
    aten._native_batch_norm_legit.default: _in_format_of(0),
    aten._native_batch_norm_legit.no_stats: _in_format_of(0),
    aten._native_batch_norm_legit_functional.default: _in_format_of(0),
    aten.native_batch_norm_backward.default: _in_format_of(1),
    aten.native_group_norm_backward.default: _in_format_of(1),
    aten.native_layer_norm_backward.default: _dense,
    aten.reflection_pad2d_backward.default: _in_format_of(1),
    aten.roll.default: _in_format_of(0),
    aten.smooth_l1_loss_backward.default: _dense,
    aten.softplus_backward.default: _elementwise,
    aten.xlogy.Tensor: _elementwise,
}
# Operators whose fake kernel divides by the number of elements, even if that is 0, and the position
# of `reduction`: a sum has the same form.
_DIVIDING = {
    aten.huber_loss_backward.default: 3,
    aten.mse_loss_backward.default: 3,
    aten.smooth_l1_loss_backward.default: 3,
}
_SUM = 2
_NUM_RESULTS = {aten.log_sigmoid_forward.default: 2}


class TrueStrides(FakeTensorMode):
    """A fake mode whose results have the strides that operators return on a CPU.

    With symbolic sizes, operators run by their Python decompositions if there are any, as in
    tracing. Those in C++ (`constant_pad_nd`) would specialise on the value of a size.

    known: records how results are made, and answers calls that need values (`KnownValues`).
    """

    # torch looks up their rules by a mode's exact class, and so finds none for this one
    supports_higher_order_operators = True

    def __init__(self, known: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.known = known
        self._in_python: list[Any] = []

    def __enter__(self) -> Any:
        is_symbolic = self.shape_env is not None
        self._in_python.append(enable_python_dispatcher() if is_symbolic else nullcontext())
        self._in_python[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._in_python.pop().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        known = self.known if isinstance(func, OpOverload) else None
        if known is None:
            return self._made(func, types, args, kwargs)
        answer = known.answer(self, func, args, kwargs or {})
        if answer is not None:
            return answer[0]
        made = self._made(func, types, args, kwargs)
        known.note(func, tuple(args), kwargs or {}, made)
        return made

    def _made(self, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator) and func not in registered_hop_fake_fns:
            rule_of_mode: Any = func.python_key_table[FakeTensorMode]
            return rule_of_mode(self, *args, **(kwargs or {}))
        taken = args
        if func in _DIVIDING and args[1].numel() == 0:
            taken = [_SUM if i == _DIVIDING[func] else a for i, a in enumerate(args)]
        made: Any = super().__torch_dispatch__(func, types, taken, kwargs)
        rule = _RULES.get(func)
        if rule is None or made is NotImplemented:
            return made
        if isinstance(made, Tensor):
            return self._corrected(made, rule, args)
        count = _NUM_RESULTS.get(func, 1)
        return (*(self._corrected(m, rule, args) for m in made[:count]), *made[count:])

    def _corrected(self, made: Tensor | None, rule: _Rule, args: Sequence[Any]) -> Tensor | None:
        if made is None or made.device.type != "cpu" or made.dim() == 0:
            return made
        strides = rule(made, args)
        if made.stride() == strides:
            return made
        with self:
            return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device)


# -- strides under Inductor -----------------------------------------------------------------------
_VIEWS = {aten.view.default, aten._unsafe_view.default}  # these fail if strides do not permit them


class _Decomposing(TorchDispatchMode):
    """Runs each operator as its decomposition, if Inductor has one."""

    def __init__(self) -> None:
        from torch._inductor.decomposition import select_decomp_table

        super().__init__()
        self._table = select_decomp_table()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        decomposed = self._table.get(func)
        if decomposed is not None:
            with self:
                made = decomposed(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return func(*args, **(kwargs or {}))


def keep_strides(gm: fx.GraphModule, fakes: Sequence[Any]) -> None:
    """Give the graph's results under Inductor's decompositions their original strides.

    Views of computed values become `reshape`, which copies if necessary. A copy restores the
    strides of results that decomposing would change, and of inputs of `as_strided`. Inductor writes
    the copy in the loop that computes the value, if it generates one. Nothing else is copied, and
    views of inputs stay views.
    """
    graph = gm.graph
    fixed = _views_of_inputs(graph)
    for node in graph.nodes:
        if node.target in _VIEWS and node not in fixed:
            node.target = aten.reshape.default
    returned: Any = graph.output_node().args[0]
    results = [n for n in returned if isinstance(n, fx.Node)]
    bases = [n.args[0] for n in graph.nodes if n.target is aten.as_strided.default]
    plain: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), fakes, strict=True))
    decomposed = dict(plain)
    mode = _Decomposing()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        plain[node] = _run(node, plain)
        try:
            with mode:
                decomposed[node] = _run(node, decomposed)
        except Exception:  # # noqa: BLE001 - if Inductor meets it too, its error says more
            decomposed[node] = plain[node]
        if (node in results or node in bases) and node not in fixed:
            copied = _copied_into_place(graph, node, plain[node], decomposed[node])
            if copied is not None:
                plain[copied] = decomposed[copied] = plain[node]
    gm.recompile()


def _views_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    found = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if node.op == "call_function" and is_view(node.target) and node.args[0] in found:
            found.add(node)
    return found


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _copied_into_place(graph: fx.Graph, node: fx.Node, wanted: Any, found: Any) -> fx.Node | None:
    """Replace a node by a copy in the wanted strides, if they differ and the copy is one call."""
    if not isinstance(wanted, Tensor) or has_strides(found, wanted.stride()):
        return None
    if not _is_dense(wanted):
        return None  # part of a larger tensor: the code that runs the region corrects it
    strides = wanted.stride()
    order = sorted(range(wanted.dim()), key=lambda d: -strides[d])
    back = [order.index(d) for d in range(wanted.dim())]
    with graph.inserting_after(node):
        turned = graph.call_function(aten.permute.default, (node, order))
    with graph.inserting_after(turned):
        dense = graph.call_function(
            aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
        )
    with graph.inserting_after(dense):
        copied = graph.call_function(aten.permute.default, (dense, back))
    node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not turned)
    return copied


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, each position once, in any order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides in all dimensions with a size above 1."""
    if tensor.stride() == tuple(strides) or tensor.numel() == 0:
        return True
    return all(
        n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def laid_out(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the tensor, or a copy of it that has these strides."""
    if has_strides(tensor, strides):
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
