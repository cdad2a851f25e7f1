"""The bindings that regions call are those of the same overload, and compute the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx.compat.operators import ATEN, FUNCTIONS, METHODS, binding


def x() -> Tensor:
    return torch.linspace(0.1, 3, 24).view(4, 6)


def image() -> Tensor:
    return torch.linspace(-1, 1, 2 * 4 * 6 * 6).view(2, 4, 6, 6)


ONES = torch.ones(4)
SQUARE = torch.linspace(-1, 1, 36).view(6, 6)
CUBE = torch.linspace(-1, 1, 48).view(2, 4, 6)
MASK = torch.arange(24).view(4, 6) % 2 == 0
BF16 = torch.bfloat16
# The arguments of each call as regions write them: one list of positional and one of named ones.
CALLS: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "_adaptive_avg_pool2d.default": [([image(), [2, 2]], {})],
    "_log_softmax.default": [([x(), 1, False], {})],
    "_log_softmax_backward_data.default": [([x(), x(), 1, torch.float32], {})],
    "_softmax.default": [([x(), -1, False], {})],
    "_softmax_backward_data.default": [([x(), x(), -1, torch.float32], {})],
    "add.Tensor": [([x(), x()], {}), ([x(), 1e-5], {}), ([x(), x()], {"alpha": 2}), ([x(), 1], {})],
    "addmm.default": [
        ([torch.ones(6), x(), SQUARE], {}),
        ([torch.ones(6), x(), SQUARE], {"beta": 2}),
    ],
    "avg_pool2d.default": [
        ([image(), [2, 2], [2, 2]], {}),
        ([image(), [3, 3], [2, 2], [1, 1], False, False], {}),
    ],
    "baddbmm.default": [([torch.ones(2, 4, 6), CUBE, SQUARE.expand(2, 6, 6)], {})],
    "bmm.default": [([CUBE, SQUARE.expand(2, 6, 6)], {})],
    "cat.default": [([[x(), x()], 1], {}), ([[x(), x()]], {})],
    "clone.default": [([x().t()], {"memory_format": torch.contiguous_format}), ([x()], {})],
    "convolution.default": [
        ([image(), torch.ones(8, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1], {}),
        ([image(), torch.ones(4, 2, 2, 2), ONES[:2], [2, 2], [0, 0], [1, 1], True, [0, 0], 1], {}),
    ],
    "div.Tensor": [([x(), x()], {}), ([x(), 3], {})],
    "embedding.default": [
        ([SQUARE, torch.tensor([[1, 2]])], {}), ([SQUARE, torch.tensor([1, 2]), 0], {}),
        ([SQUARE, torch.tensor([1, 2]), -1, True, False], {}),
    ],
    "eq.Tensor": [([x(), x()], {})],
    "gelu.default": [([x()], {}), ([x()], {"approximate": "tanh"})],
    "index_select.default": [([x(), 0, torch.tensor([1, 0])], {})],
    "leaky_relu.default": [([x(), 0.2], {}), ([x()], {})],
    "masked_fill.Scalar": [([x(), MASK, -1.0], {})],
    "max_pool2d_with_indices.default": [
        ([image(), [2, 2], [2, 2]], {}),
        ([image(), [3, 3], [2, 2], [1, 1]], {}),
    ],
    "mean.dim": [([x(), [1], True], {}), ([x(), [-1]], {})],
    "mm.default": [([x(), SQUARE], {})],
    "mul.Tensor": [([x(), x()], {}), ([x(), 0.5], {})],
    "native_batch_norm.default": [
        ([image(), ONES, ONES, ONES.clone(), ONES.clone(), True, 0.1, 1e-5], {}),
    ],
    "native_group_norm.default": [([image(), ONES, ONES, 2, 4, 36, 2, 1e-5], {})],
    "native_layer_norm.default": [
        ([x(), [6], torch.ones(6), torch.ones(6), 1e-5], {}),
        ([x(), [6], None, None, 1e-5], {}),
    ],
    "permute.default": [([CUBE, [2, 0, 1]], {})],
    "select.int": [([x(), 0, 1], {})],
    "split.Tensor": [([x(), 2, 1], {}), ([x(), 3], {})],
    "squeeze.dim": [([x()[None], 0], {})],
    "stack.default": [([[x(), x()], 1], {}), ([[x(), x()]], {})],
    "sub.Tensor": [([x(), x()], {}), ([x(), 1], {})],
    "sum.dim_IntList": [
        ([x(), [0], True], {}),
        ([x(), [0, 1]], {}),
        ([x(), [0]], {"dtype": torch.float64}),
    ],
    "transpose.int": [([x(), 0, 1], {})],
    "unbind.int": [([x(), 1], {}), ([x()], {})],
    "unsqueeze.default": [([x(), 0], {})],
    "where.self": [([MASK, x(), torch.zeros(())], {})],
    "add_.Tensor": [([x(), x()], {}), ([x(), 1e-5], {}), ([x(), x()], {"alpha": 2})],
    "div_.Tensor": [([x(), x()], {}), ([x(), 3], {})],
    "expand.default": [([x()[:, :1], [4, 6]], {}), ([x()[:1], [2, -1, 6]], {})],
    "masked_fill_.Scalar": [([x(), MASK, -1.0], {})],
    "mul_.Tensor": [([x(), x()], {}), ([x(), 0.5], {})],
    "sub_.Tensor": [([x(), x()], {}), ([x(), 1], {})],
    "view.default": [([x(), [2, 12]], {}), ([x(), [-1]], {})],
}  # fmt: skip
ONE_ARGUMENT = [([x()], {}), ([x().to(BF16)], {})]


class Seen(TorchDispatchMode):
    """Notes the operators that reach dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(v) for v in value]
    return value.clone() if isinstance(value, Tensor) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return (
            one.stride() == other.stride() and torch.equal(one, other) and one.dtype == other.dtype
        )
    return bool(one == other)


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_a_binding_calls_its_operator(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    bound = getattr(getattr(ATEN, packet), overload)
    assert bound is binding(name) is not None and bound is not operator
    for args, named in CALLS.get(name, ONE_ARGUMENT):
        seen = []
        results = []
        for call in (operator, bound):
            given = copied(args)
            with torch.no_grad(), Seen() as mode:
                results.append((call(*given, **named), given))  # what it returns and writes to
            seen.append(mode.calls)
        (expected,), (found,) = seen
        assert found[0] is expected[0] is operator
        assert same(results[0], results[1])


def test_other_operators_are_those_of_torch() -> None:
    assert (
        ATEN.native_layer_norm_backward.default is torch.ops.aten.native_layer_norm_backward.default
    )
    with pytest.raises(AttributeError, match="no_such"):
        _ = ATEN.no_such.default


def test_each_argument_list_is_of_a_binding() -> None:
    assert set(CALLS) <= {*FUNCTIONS, *METHODS}
