"""Probes of convolutions: each pass by window, channels and rows."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from zerofx.analysis.time.kernels import FORWARD, INPUT, PASSES, WINDOWS
from zerofx.tools.calibrate.compute import FORMATS, IMAGES
from zerofx.tools.calibrate.probe import Probe, Work, in_turn

CHANNELS = {"1x1": (32, 128, 512), "3x3": (32, 64, 128, 256, 512)}
SIDES = (4, 8, 16, 32)
MOST_FLOPS = 7e8  # of one call; curves end below more expensive calls, where shares hardly grow


def convolutions() -> list[Probe]:
    """Return the passes of convolutions with equal channels in and out, by rows of the result."""
    probes = []
    for (name, dtype), direction, window in product(FORMATS.items(), PASSES, WINDOWS):
        for channels, side in product(CHANNELS[window], SIDES):
            rows = IMAGES * side * side
            flops = 2.0 * rows * WINDOWS[window] * channels * channels
            if flops <= MOST_FLOPS:
                make = partial(_convolution, channels, side, window, direction, dtype)
                make = partial(in_turn, make)
                curve = f"convolution.{name}.{direction}.{window}.{channels}"
                probes.append(Probe(curve, rows, flops, make))
    return probes


def _convolution(channels: int, side: int, window: str, direction: str, dtype: torch.dtype) -> Work:
    """Convolve images and weights in the layouts of batches and buckets."""
    width = int(window[0])
    padding = width // 2
    x = torch.randn(IMAGES, channels, side, side).to(dtype)
    weight = torch.randn(channels, channels, width, width).to(dtype)
    if direction == FORWARD:
        return lambda: F.conv2d(x, weight, padding=padding)
    grad = torch.randn_like(x)
    wanted = [direction == INPUT, direction != INPUT, False]
    fixed = [0], [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1, wanted
    return lambda: torch.ops.aten.convolution_backward(grad, x, weight, *fixed)
