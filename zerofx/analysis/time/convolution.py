"""What a convolution multiplies, pass by pass: its result, and the gradients of what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zerofx.ir.meta import nbytes, value

FORWARD, INPUT, WEIGHT = "forward", "input", "weight"
PASSES = (FORWARD, INPUT, WEIGHT)
WINDOWS = {"1x1": 1, "3x3": 9}  # that were measured, and their pixels; the latter stands for others
_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class ConvolutionPass:
    """One of the products that a convolution is made of.

    direction: "forward", or "input" and "weight" for the gradient of either.
    rows: samples x pixels of the result. weight_numel: elements of the weight; `rows` times these
        are multiplied. is_pointwise: the window is one pixel.
    """

    direction: str
    rows: int
    weight_numel: int
    is_pointwise: bool

    @property
    def window(self) -> str:
        return "1x1" if self.is_pointwise else "3x3"


def passes(node: fx.Node) -> tuple[ConvolutionPass, ...]:
    """Return what a convolution, or its backward, multiplies; nothing for other nodes.

    A transposed one multiplies as the gradient of an input does, and its gradient as a forward.
    """
    if node.target not in (_CONVOLUTION, _BACKWARD):
        return ()
    is_backward = node.target is _BACKWARD
    given, weight = _tensors(node)[1:3] if is_backward else _tensors(node)[:2]
    result = _tensors(node)[0] if is_backward else value(node)
    is_transposed = bool(node.args[7 if is_backward else 6])
    outer = given if is_transposed else result
    rows = outer.numel() // outer.shape[1]
    wanted = node.args[10] if is_backward else (True,)
    names = (INPUT, WEIGHT) if is_backward else (FORWARD,)
    turned = {FORWARD: INPUT, INPUT: FORWARD} if is_transposed else {}
    is_pointwise = weight.shape[2:].numel() == 1
    return tuple(
        ConvolutionPass(turned.get(name, name), rows, weight.numel(), is_pointwise)
        for name, is_wanted in zip(names, wanted, strict=False)  # type: ignore[arg-type]
        if is_wanted
    )


def copied_bytes(node: fx.Node, leaves: bool) -> int:
    """Return the bytes read and written to lay out a compiled forward's images and weights.

    Inductor convolves on CPUs with channels last: what lies otherwise is copied before, and a
    result that leaves the region is copied back by the kernel that reads it first.
    """
    if node.target is not _CONVOLUTION:
        return 0
    turned = sum(2 * t.nbytes for t in _tensors(node)[:2] if not _has_channels_last(t))
    return turned + (nbytes(value(node)) if leaves else 0)


def _has_channels_last(tensor: Tensor) -> bool:
    """Tell whether a value lies as Inductor wants it; images of fewer than two sides do."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = formats.get(tensor.dim())
    return form is None or tensor.is_contiguous(memory_format=form)


def _tensors(node: fx.Node) -> list[Tensor]:
    return list(_found(node))


def _found(node: fx.Node) -> Iterator[Tensor]:
    for given in node.args:
        if isinstance(given, fx.Node):
            yield value(given)
