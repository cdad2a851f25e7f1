"""States in 8 bits: blocks of 256 elements share a largest magnitude; codes are fourth roots.

    a = max |x| over a block
    signed:    x = a sign(k) (|k| / 127)^4,   k = -127 .. 127, stored as k + 128
    unsigned:  x = a ((k + 1) / 256)^4,       k = 0 .. 255

so that the relative error is 1.6 % (signed) or 0.8 % at the block's largest value and 5 or 2.5 % at
a hundredth of it. No unsigned code is 0 while a > 0: a second moment that became 0 beside a first
moment that did not would make a step of m / eps. Coding what was decoded gives the same codes.

Blocks begin at multiples of 256 of the parameter's own elements; where a cut between ranks falls
into one, each rank codes its part by itself. What a rank has of a tiled parameter counts as one
part.

Source: "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), sections 2.1 and 3, with
another non-linear map than its dynamic tree: this one needs two square roots and no search.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerofx.runtime.kernels.launch import use_triton
from zerofx.runtime.kernels.quantise import dequantise, quantise

BLOCK = 256


@dataclass(frozen=True)
class Codes:
    """One state of neighbouring parameters.

    Shapes: codes uint8 [blocks * 256], absmax float32 [blocks]; spans holds each parameter's
    half-open range of elements in `codes`. What lies between belongs to no parameter.
    """

    codes: Tensor
    absmax: Tensor
    spans: tuple[tuple[int, int], ...]
    is_signed: bool

    @classmethod
    def zeros(
        cls, pieces: Sequence[tuple[int, int]], is_signed: bool, device: torch.device
    ) -> Codes:
        """Return codes of zeros for pieces of parameters, each (first element, length)."""
        spans, base = [], 0
        for start, length in pieces:
            begin = base + start % BLOCK
            spans.append((begin, begin + length))
            base += _whole_blocks(start % BLOCK + length if length else 0)
        codes = torch.zeros(base, dtype=torch.uint8, device=device)
        absmax = torch.zeros(base // BLOCK, device=device)
        return cls(codes, absmax, tuple(spans), is_signed)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes

    def of(self, first: int, last: int) -> Codes:
        """Return the codes of the parameters first:last, over the same memory."""
        begin = self.spans[first][0] // BLOCK * BLOCK
        end = max(begin, _whole_blocks(self.spans[last - 1][1]))
        spans = tuple((a - begin, b - begin) for a, b in self.spans[first:last])
        absmax = self.absmax[begin // BLOCK : end // BLOCK]
        return Codes(self.codes[begin:end], absmax, spans, self.is_signed)

    def values(self, start: int, stop: int) -> Tensor:
        """Return what the codes start:stop stand for, float32; both are multiples of 256."""
        codes, absmax = self._part(start, stop)
        if use_triton(codes.device):
            return dequantise(codes, absmax, code_book(self.is_signed, codes.device), BLOCK)
        if self.is_signed:
            k = codes.float().sub_(128.0).div_(127.0)
            x = k.square().square_().copysign_(k)
        else:
            x = codes.float().add_(1.0).div_(256.0).square_().square_()
        return x.view(-1, BLOCK).mul_(absmax[:, None]).view(-1)

    def store(self, start: int, stop: int, values: Tensor) -> None:
        """Code float32 `values` into start:stop; both are multiples of 256."""
        codes, absmax = self._part(start, stop)
        if use_triton(codes.device):
            book = code_book(self.is_signed, codes.device)
            for target, found in zip((codes, absmax), quantise(values, book, BLOCK), strict=True):
                target.copy_(found)
            return
        rows = values.view(-1, BLOCK)
        torch.amax(rows.abs(), 1, out=absmax)
        scaled = rows / torch.where(absmax > 0.0, absmax, 1.0)[:, None]
        if self.is_signed:
            k = scaled.abs().sqrt_().sqrt_().mul_(127.0).round_().copysign_(scaled).add_(128.0)
        else:
            k = scaled.sqrt_().sqrt_().mul_(256.0).round_().sub_(1.0).clamp_(min=0.0)
        codes.copy_(k.view(-1))

    def read(self, number: int) -> Tensor:
        """Return one parameter's values, float32 [length]."""
        mine = self.of(number, number + 1)
        begin, end = mine.spans[0]
        return mine.values(0, mine.codes.numel())[begin:end]

    def write(self, number: int, values: Tensor) -> None:
        """Code one parameter's values [length]."""
        mine = self.of(number, number + 1)
        begin, end = mine.spans[0]
        room = values.new_zeros(mine.codes.numel(), dtype=torch.float32)
        room[begin:end] = values
        mine.store(0, room.numel(), room)

    def _part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.codes[start:stop], self.absmax[start // BLOCK : stop // BLOCK]


def _whole_blocks(numel: int) -> int:
    return -(-numel // BLOCK) * BLOCK


@functools.cache
def code_book(is_signed: bool, device: torch.device) -> Tensor:
    """Return the value of each code for a block whose largest is 1: float32 [256], ascending."""
    k = torch.arange(256, dtype=torch.float64, device=device)
    if is_signed:
        root = ((k - 128.0) / 127.0).clamp(min=-1.0)
        return (root.abs() ** 4).copysign(root).float()
    return (((k + 1.0) / 256.0) ** 4).float()
