"""8-bit blocks: floating-point values as int8 codes, with one scale per block of neighbours.

A block of `BLOCK` values x is sent as codes q = round(x / s) with s = max|x| / 127, and read as
q * s, so that each value is off by at most 0.5 / 127 of the largest magnitude in its block. A block
whose magnitudes are all below `SMALLEST` * 127 becomes zeros. A block that holds an infinity or a
NaN is read without a single finite value, so that a loss scale still sees the overflow.

A message holds the codes of all blocks, then their scales: `message_bytes(numel)` bytes.

Source: block-quantised collectives, ZeRO++ (arXiv 2306.10209), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 128
"""Neighbouring values that share one scale."""
RELATIVE_ERROR = 0.5 / 127
"""Largest error of a value, relative to the largest magnitude in its block."""
SMALLEST = 1e-36
"""Scales up to this one are taken for zero: their inverse would overflow."""
_STRETCH = 512  # blocks that are coded at a time: their fp32 copies stay in a core's cache


def num_blocks(numel: int) -> int:
    """Return how many blocks hold `numel` values; the last one may be partly filled."""
    return -(-numel // BLOCK)


def message_bytes(numel: int) -> int:
    """Return the bytes of a message of `numel` values: about 1.03 per value."""
    return num_blocks(numel) * (BLOCK + torch.float32.itemsize)


@torch.no_grad()
def encode(values: Tensor, message: Tensor) -> None:
    """Write `values` into `message`.

    Shapes: values [n], of any floating-point dtype; message [message_bytes(n)], int8.
    """
    codes, scales = _views(message)
    for first, end in _stretches(len(scales)):
        given = values[first * BLOCK : end * BLOCK]
        if given.numel() < (end - first) * BLOCK:
            given = torch.nn.functional.pad(given, (0, (end - first) * BLOCK - given.numel()))
        blocks = given.view(-1, BLOCK).float()
        low, high = torch.aminmax(blocks, dim=1)
        scale = torch.maximum(high, low.neg_()).div_(127)
        scale.masked_fill_(scale <= SMALLEST, 0.0)
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        codes[first:end].copy_((blocks * inverse[:, None]).round_())
        scales[first:end] = scale


@torch.no_grad()
def decode(message: Tensor, out: Tensor) -> None:
    """Set `out` to the values of `message`.

    Shapes: message [message_bytes(n)], int8; out [n], of any floating-point dtype.
    """
    for part, (first, end) in _read(message, out.numel()):
        out[first:end].copy_(part)


@torch.no_grad()
def add_decoded(message: Tensor, out: Tensor) -> None:
    """Add the values of `message` to `out` [n]."""
    for part, (first, end) in _read(message, out.numel()):
        out[first:end].add_(part)


def _read(message: Tensor, numel: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Yield the values of a message in stretches, in fp32, with the range that each fills."""
    codes, scales = _views(message)
    for first, end in _stretches(len(scales)):
        part = torch.mul(codes[first:end], scales[first:end, None]).view(-1)
        last = min(end * BLOCK, numel)
        yield part[: last - first * BLOCK], (first * BLOCK, last)


def _stretches(blocks: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + _STRETCH, blocks)) for first in range(0, blocks, _STRETCH))


def _views(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [blocks, BLOCK], scales [blocks]) of a message, as views of it."""
    blocks = message.numel() // (BLOCK + torch.float32.itemsize)
    codes, scales = message[: blocks * BLOCK], message[blocks * BLOCK :]
    return codes.view(blocks, BLOCK), scales.view(torch.float32)
