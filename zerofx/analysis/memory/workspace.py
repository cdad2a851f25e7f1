"""Workspaces: memory that some CPU operators allocate internally, in addition to their results.

Measured with the allocator's events on torch 2.11 and 2.13, one thread: the operators here make
copies in the layout of their library. Other operators allocate little or nothing. CUDA workspaces
depend on the algorithm chosen at run time and cannot be predicted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zerofx.ir.meta import nbytes, value
from zerofx.kernels import ops
from zerofx.kernels.cross_entropy import tile_sizes
from zerofx.kernels.recurrent import (
    lstm_direction,
    lstm_direction_grads,
    recurrent,
    recurrent_grads,
)

aten = torch.ops.aten
_BACKWARD = aten.convolution_backward.default
_PADDING = 8 << 10


def convolution_bytes(node: fx.Node, is_channels_last: bool) -> int:
    """Return the internal memory of a convolution or its backward, for one layout of its result."""
    weight = value(node.all_input_nodes[2 if node.target is _BACKWARD else 1])
    if is_channels_last:  # the library's own layout, except for the weight, which it blocks
        return 2 * nbytes(weight) if node.target is _BACKWARD else _weight_in_blocks(weight)
    return _plain_backward(node) if node.target is _BACKWARD else _plain(node)


def _convolution(node: fx.Node) -> int:
    found = value(node)
    made = found if isinstance(found, torch.Tensor) else next(t for t in found if t is not None)
    return convolution_bytes(node, made.dim() > 2 and made.stride(1) == 1 < made.shape[1])


def _plain(node: fx.Node) -> int:
    """Return the input and weight in the library's layout, or the result in it before its copy."""
    given, weight = (value(n) for n in node.all_input_nodes[:2])
    taken = 0 if given.shape[1] < _BLOCK else nbytes(given)
    return max(taken + nbytes(weight), _in_blocks(value(node)))


def _plain_backward(node: fx.Node) -> int:
    """Return the incoming gradient and input in the library's layout, or one of the results in it.

    With strides, the input's gradient is copied once more before the weight's gradient exists.
    """
    grad, given, weight = (value(n) for n in node.all_input_nodes[:3])
    arguments: Any = node.args
    taken = 0 if given.shape[1] < _PLAIN else _in_blocks(given)
    found = [_in_blocks(grad) + taken, nbytes(weight)]
    if arguments[-1][0] and max(arguments[4]) > 1:
        found.append(2 * nbytes(given) - nbytes(weight))
    return max(found)


_PLAIN, _BLOCK = 4, 16  # channels: fewer are not copied; others are in blocks


def _in_blocks(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in the library's layout."""
    channels = tensor.shape[1]
    return nbytes(tensor) // channels * (-(-channels // _BLOCK) * _BLOCK)


def _weight_in_blocks(weight: torch.Tensor) -> int:
    """Return the bytes of a weight in the library's layout, which pads its output channels.

    A block has 16 channels with AVX-512 and 24 without it, on the CPU that runs this (measured).
    """
    block = _BLOCK if torch.backends.cpu.get_cpu_capability() == "AVX512" else 24
    channels = weight.shape[0]
    return nbytes(weight) // channels * (-(-channels // block) * block) + _PADDING


def _batch_norm_backward(node: fx.Node) -> int:
    return nbytes(value(node.all_input_nodes[0]))


def _product_of_bf16(node: fx.Node) -> int:
    """Return the fp32 accumulator of the result; formats other than bf16 accumulate in place.

    A CPU that multiplies bf16 itself has an accumulator and copies of the operands for one block
    of the result only, on one thread (measured, with oneDNN 3.12; blocks of large products may be
    smaller). With AVX2 alone, torch multiplies bf16 without the library, in place (measured: torch
    2.13).
    """
    found = value(node)
    if found.dtype is not torch.bfloat16 or torch.backends.cpu.get_cpu_capability() == "AVX2":
        return 0
    if not _multiplies_bf16():
        return 4 * found.numel()
    operands: Any = node.args[-2:]  # not its input nodes: both may be the same one
    left = value(operands[0])
    rows, columns = min(len(found), _BLOCK_ROWS), min(found.shape[1], _BLOCK_COLUMNS)
    depth = min(-(-left.shape[1] // 64) * 64, _BLOCK_DEPTH)
    if len(found) == 1:  # a product with a vector
        return 0
    copied = 2 * depth * min(len(found), _BLOCK_DEPTH) if left.stride(0) < left.stride(1) else 0
    return 1024 + 4 * rows * columns + 2 * depth * _BLOCK_COLUMNS + copied


_BLOCK_ROWS, _BLOCK_COLUMNS, _BLOCK_DEPTH = 256, 64, 1024


@functools.cache
def _multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for products of bf16."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _dropout(node: fx.Node) -> int:
    """Return the mask before its conversion to booleans."""
    return nbytes(value(node.all_input_nodes[0]))


def _loss_head(node: fx.Node) -> int:
    """Return a tile of logits, and in half precision also its fp32 copy."""
    given: Any = node.args
    hidden, weight = given[:2]
    return _tile(hidden, weight, 1, 1 if _is_half(hidden) else 0)


def _loss_head_backward(node: fx.Node) -> int:
    """Return the forward's; in half precision also the tile's gradient and dhidden's sum."""
    given: Any = node.args
    hidden, weight = given[1:3]
    if not _is_half(hidden):
        return _tile(hidden, weight, 1, 0)
    rows, _ = tile_sizes(len(value(hidden)), len(value(weight)))
    return _tile(hidden, weight, 2, 1) + 2 * nbytes(value(hidden)) + _product(hidden, rows)


def _tile(hidden: Any, weight: Any, own: int, wide: int) -> int:
    """Return the bytes of `own` tiles in the dtype of hidden, and of `wide` ones in fp32."""
    rows, columns = tile_sizes(len(value(hidden)), len(value(weight)))
    return rows * columns * (own * value(hidden).element_size() + 4 * wide)


def _product(hidden: Any, rows: int) -> int:
    return int(rows * value(hidden).shape[1] * value(hidden).element_size())


def _is_half(node: Any) -> bool:
    return bool(value(node).element_size() < 4)


_GATES = {"gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent(node: fx.Node) -> int:
    """Return the gates of every time step: in an LSTM of one direction at a time, else of all."""
    return _layer(tuple(node.args))[0]


def _recurrent_backward(node: fx.Node) -> int:
    """Return the values that the repeated forward keeps, and the gates' gradients."""
    return _layer(tuple(node.args[1:]))[1]


def _layer(arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Return the internal memory of a recurrent layer's forward and of its backward."""
    source, hidden, weights, mode = arguments[:4]
    steps, batch, features = value(source).shape
    directions, _, width = value(hidden[-1]).shape
    cells = steps * batch * width * value(source).element_size()  # of one direction
    if mode != "lstm":
        gates = directions * _GATES[mode] * cells
        return (gates * 4 // 3, gates * 8 // 3) if mode == "gru" else (2 * gates, 2 * gates)
    own = sum(nbytes(value(w)) for w in weights) // directions
    copies = nbytes(value(source)) if features != width else 0
    return 4 * cells + own + copies, 4 * (1 + 4 * directions) * cells + own + 3 * copies


def _lstm_direction(node: fx.Node) -> int:
    """Return the gates of every step and the weights in oneDNN's layout.

    In inference, states as wide as the input are also internal.
    """
    arguments: Any = node.args
    source, h, _, weights, _, is_training, _ = arguments
    inside = _gates_and_weights(source, h, weights)
    features, cells = value(source).shape[2], value(h).shape[1]
    return inside if is_training or features <= cells else inside + _in_lines(source, features)


def _lstm_direction_backward(node: fx.Node) -> int:
    """Return the forward's, and copies of sequences whose rows are not whole lines.

    A gradient that is missing is filled with zeros.
    """
    arguments: Any = node.args
    grads, (source, h, _, weights, output) = arguments[:3], arguments[3:8]
    features, cells = value(source).shape[2], value(h).shape[1]
    inside = _gates_and_weights(source, h, weights)
    if _line(features) != features:
        inside += _in_lines(source, features)
    if _line(cells) != cells:
        inside += (1 if cells % 256 else 2) * _in_lines(source, cells)
    likes = zip(grads, (output, h, h), strict=True)
    return inside + sum(nbytes(value(like)) for grad, like in likes if grad is None)


def _gates_and_weights(source: Any, h: Any, weights: Any) -> int:
    """Return the gates and weights of a direction, with biases of zeros if the layer has none."""
    (batch, cells), gates = value(h).shape, 4 * value(h).shape[1]
    rows = value(source).shape[2] + cells
    zeros = 0 if len(weights) == 4 else 8 * gates
    small = 8 * batch * cells + _SMALL
    return _in_lines(source, gates) + 4 * rows * _line(gates) + zeros + small


def _in_lines(source: Any, columns: int) -> int:
    """Return the bytes of a sequence like `source` with rows of this many columns."""
    steps, batch, _ = value(source).shape
    return int(4 * steps * batch * _line(columns))


def _line(columns: int) -> int:
    """Return the length of a row of fp32 in oneDNN: whole 64-byte lines, no multiple of 256."""
    whole = -(-columns // 16) * 16
    return whole if whole % 256 else whole + 16


_SMALL = 16 << 10


_INSIDE: dict[Any, Callable[[fx.Node], int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_dropout.default: _dropout,
    aten.mm.default: _product_of_bf16,
    aten.addmm.default: _product_of_bf16,
    ops.linear_cross_entropy: _loss_head,
    ops.linear_cross_entropy_backward: _loss_head_backward,
    lstm_direction: _lstm_direction,
    lstm_direction_grads: _lstm_direction_backward,
    recurrent: _recurrent,
    recurrent_grads: _recurrent_backward,
}


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes that an operator holds while it runs, excluding its inputs and results."""
    inside = _INSIDE.get(node.target)
    if inside is None:
        return 0
    first = value(node.all_input_nodes[0])
    return inside(node) if first.device.type == "cpu" else 0
