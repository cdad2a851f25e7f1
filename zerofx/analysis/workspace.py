"""What some operators allocate inside on a CPU, beside their results.

Measured with the allocator's events on torch 2.11 and 2.13, one thread: the operators here make
copies in the layout of their library. Others allocate little or nothing; CUDA's workspaces depend
on the algorithm that is chosen there and are not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zerofx.ir.meta import nbytes, value
from zerofx.runtime.recurrent import recurrent, recurrent_grads

aten = torch.ops.aten


def _convolution(node: fx.Node) -> int:
    """The result, before it is brought into the usual layout; the weight, in the library's."""
    return nbytes(value(node)) + nbytes(value(node.all_input_nodes[1]))


def _convolution_backward(node: fx.Node) -> int:
    """The incoming gradient and the input, each in the library's layout."""
    return sum(nbytes(value(n)) for n in node.all_input_nodes[:2])


def _batch_norm_backward(node: fx.Node) -> int:
    return nbytes(value(node.all_input_nodes[0]))


def _dropout(node: fx.Node) -> int:
    """The mask, before it is a boolean one."""
    return nbytes(value(node.all_input_nodes[0]))


_GATES = {"gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent(node: fx.Node) -> int:
    """The gates of every time step: of one direction at a time in an LSTM, else of all."""
    return _layer(tuple(node.args))[0]


def _recurrent_backward(node: fx.Node) -> int:
    """What the forward that it runs again keeps for itself, and the gates' gradients."""
    return _layer(tuple(node.args[1:]))[1]


def _layer(arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Return what a recurrent layer's forward and its backward hold inside."""
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


_INSIDE: dict[Any, Callable[[fx.Node], int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_dropout.default: _dropout,
    recurrent: _recurrent,
    recurrent_grads: _recurrent_backward,
}


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes that an operator holds while it runs, its inputs and results left out."""
    inside = _INSIDE.get(node.target)
    if inside is None:
        return 0
    first = value(node.all_input_nodes[0])
    return inside(node) if first.device.type == "cpu" else 0
