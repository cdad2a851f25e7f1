"""What operators allocate inside: convolutions by their layout, products of bf16 by the CPU."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from zerofx.analysis.memory.liveness import CompiledCall
from zerofx.analysis.memory.storage import CompiledRegion
from zerofx.analysis.memory.workspace import convolution_bytes, workspace_bytes
from zerofx.compat.wrapper import Inside, trace
from zerofx.kernels.recurrent import lstm_direction, lstm_direction_grads, workspace_of
from zerofx.tools.demo.measure import PeakMemory

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
aten = torch.ops.aten
FORMATS = {"plain": torch.contiguous_format, "channels last": torch.channels_last}
SHAPES = [(8, 64, 32, 64, 3, 1), (8, 64, 32, 128, 3, 2), (8, 128, 16, 128, 3, 1)]


def tensors(shape: tuple[int, ...], form: Any) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return an input, a weight, and the arguments behind them."""
    batch, channels, side, out, kernel, stride = shape
    x = torch.randn(batch, channels, side, side).to(memory_format=form)
    weight = torch.randn(out, channels, kernel, kernel).to(memory_format=form)
    how = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1
    return x, weight, how


def node_of(target: Any, args: tuple[Any, ...], result: Any) -> fx.Node:
    """Return a node for a call, with the values that it takes and makes."""
    graph = fx.Graph()

    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [taken(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        placeholder = graph.placeholder("x")
        placeholder.meta["val"] = value
        return placeholder

    given = [taken(value) for value in args]
    node = graph.call_function(target, tuple(given))
    node.meta["val"] = result
    return node


def inside(function: Any, *results: Tensor) -> int:
    """Return the most bytes that a call holds beside its results."""
    function()
    with PeakMemory(torch.device("cpu")) as memory, memory.step():
        kept = function()
    del kept
    return memory.steps[0].high_bytes - sum(r.nbytes for r in results)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_measured(form: str, shape: tuple[int, ...]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight, how = tensors(shape, FORMATS[form])
        y = aten.convolution(x, weight, None, *how)
        forward = node_of(aten.convolution.default, (x, weight, None, *how), y)
        found = inside(lambda: aten.convolution(x, weight, None, *how), y)
        assert workspace_bytes(forward) == pytest.approx(found, rel=0.06)
        args = (torch.randn_like(y), x, weight, [0], *how, [True, True, False])
        grads = aten.convolution_backward(*args)
        backward = node_of(aten.convolution_backward.default, args, grads)
        found = inside(lambda: aten.convolution_backward(*args), *grads[:2])
        assert workspace_bytes(backward) == pytest.approx(found, rel=0.06)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 64), (128, 64, 256), (1024, 128, 512)], ids=str)
def test_products_of_bf16(shape: tuple[int, int, int], is_turned: bool) -> None:
    rows, depth, columns = shape
    left = torch.randn(depth, rows, dtype=torch.bfloat16).t()
    left = left if is_turned else left.contiguous()
    right = torch.randn(columns, depth, dtype=torch.bfloat16).t()
    made = aten.mm(left, right)
    node = node_of(aten.mm.default, (left, right), made)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = inside(lambda: aten.mm(left, right), made)
    finally:
        torch.set_num_threads(threads)
    assert found <= workspace_bytes(node) + 1024
    assert workspace_bytes(node) - found < 0.2 * (found + made.nbytes)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("shape", [(5, 2, 3, 4), (64, 8, 64, 128), (64, 8, 100, 128)], ids=str)
def test_lstm_in_onednn(shape: tuple[int, ...], has_biases: bool) -> None:
    """What the kernels hold, with what they return: the workspace is exact, the rest is near."""
    steps, batch, features, cells = shape
    x, h = torch.randn(steps, batch, features), torch.randn(batch, cells)
    grad = torch.randn(steps, batch, cells)
    weights = [torch.randn(4 * cells, n) for n in (features, cells)]
    weights += [torch.randn(4 * cells)] * 2 if has_biases else []
    size = workspace_of(*shape)
    args = (x, h, h, weights, False, True, size)
    results = lstm_direction(*args)
    assert results[3].nbytes == size
    taken = (grad, None, h, x, h, h, weights, *results, False)
    for op, given, made in (
        (lstm_direction, args, results),
        (lstm_direction_grads, taken, lstm_direction_grads(*taken)),
    ):
        call = functools.partial(op, *given)
        result_bytes = sum(t.nbytes for t in made)
        predicted = workspace_bytes(node_of(op, given, made)) + result_bytes
        assert predicted == pytest.approx(inside(call, *made) + result_bytes, rel=0.1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("shape", [(200, 16, 5, 7), (70, 96, 3, 9), (2100, 3, 2, 3)], ids=str)
def test_workspace_of_long_sequences(shape: tuple[int, ...]) -> None:
    """It is extrapolated from short ones, exactly."""
    steps, batch, features, cells = shape
    x, h = torch.zeros(steps, batch, features), torch.zeros(batch, cells)
    weights = [torch.zeros(4 * cells, n) for n in (features, cells)]
    *_, workspace = lstm_direction(x, h, h, weights, False, True, 0)
    assert workspace.nbytes == workspace_of(*shape)


def test_a_bf16_product_of_a_matrix_with_itself() -> None:
    """Its node has one input node, which is both operands."""
    graph = fx.Graph()
    square = torch.eye(64, dtype=torch.bfloat16)
    given = graph.placeholder("square")
    given.meta["val"] = square
    squared = graph.call_function(aten.mm.default, (given, given))
    squared.meta["val"] = aten.mm(square, square)
    is_in_place = torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert (workspace_bytes(squared) == 0) == is_in_place


WRAPPER = """
def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = extern_kernels.convolution(arg0_1, arg1_1, stride=(1, 1))
    assert_size_stride(buf0, (8, 64, 32, 32), (65536, 1, 2048, 64), 'torch.ops.aten.convolution')
    buf1 = torch.ops.aten.convolution_backward.default(buf0, arg0_1, arg1_1, [0])
    del buf0
    buf2 = buf1[0]
    assert_size_stride(buf2, (8, 64, 32, 32), (65536, 1024, 32, 1), 'convolution_backward')
    buf3 = buf1[1]
    assert_size_stride(buf3, (64, 64, 3, 3), (576, 9, 3, 1), 'convolution_backward')
    del buf1
    return (buf2, buf3, )
"""


def test_in_compiled_regions() -> None:
    """The wrapper says in which layout each convolution runs, and when."""
    found = trace(WRAPPER)
    assert found is not None
    first, second = Inside("convolution", 0), Inside("convolution_backward", 0)
    assert [m.inside for m in found.moments] == [first, second, second, second, None]
    assert found.channels_last == {first}
    x, weight, how = tensors((8, 64, 32, 64, 3, 1), torch.contiguous_format)
    y = aten.convolution(x, weight, None, *how)
    forward = node_of(aten.convolution.default, (x, weight, None, *how), y)
    args = (y, x, weight, [0], *how, [True, True, False])
    backward = node_of(aten.convolution_backward.default, args, (x, weight, None))
    region = CompiledRegion((forward, backward), (), (), found)
    call = CompiledCall(region, 3, [(), ()])
    least = x.nbytes + weight.nbytes  # both results, none of which has a reader here
    assert call.settle().nbytes == least + convolution_bytes(backward, False)
    assert convolution_bytes(forward, True) < convolution_bytes(forward, False)

    others = CompiledRegion(
        (forward.all_input_nodes[0],), (), (), found
    )  # of which the compiler has made something else
    assert CompiledCall(others, 3, [(), ()]).settle().nbytes == least
