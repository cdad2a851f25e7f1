"""Block-wise 8-bit quantisation with a code book: the format of 8-bit optimizer states.

    absmax[b] = max |x| over block b
    q[i] = index of the code nearest to x[i] / absmax[b],   x'[i] = code[q[i]] * absmax[b]

The code book has 256 sorted entries within [-1, 1]. The dynamic map spreads them over seven
decades, so that small values keep their relative precision.

Source: 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), sections 2.1 and 2.2.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.kernels.launch import check_flat, kernel, num_blocks, use_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 256  # elements that share an absmax
_DECADES = 7


@functools.cache
def dynamic_code(is_signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Return the dynamic map: fp32 [256], ascending; it contains 0 and 1.

    Each of seven decades holds twice as many values as the one below: the midpoints of equal
    intervals of [0.1, 1], with both signs if the map is signed.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade if is_signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        values = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        found += values.tolist() + ((-values).tolist() if is_signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def quantise(x: Tensor, code: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise flat memory block by block.

    Shapes: x [numel] of any float dtype; code fp32 [256], ascending; block a power of 2; the
        result is (uint8 [numel], absmax fp32 [ceil(numel / block)]).

    Error: at most half the gap between neighbouring codes, times the block's absmax.

    Raises:
        ValueError: x is not flat.
    """
    check_flat(x.numel(), x=x)
    if not use_triton(x.device):
        return quantise_torch(x, code, block)
    count = num_blocks(x.numel(), block)
    q = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    absmax = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        _quantise[(count,)](x, middles(code), q, absmax, x.numel(), BLOCK=block)
    return q, absmax


def dequantise(
    q: Tensor, absmax: Tensor, code: Tensor, block: int = BLOCK, out: Tensor | None = None
) -> Tensor:
    """Return the values of the codes, in `out` or as new fp32 memory.

    Shapes: as `quantise` returns them; the result [numel].

    Raises:
        ValueError: a tensor is not flat, or absmax does not have one element per block.
    """
    check_flat(q.numel(), q=q, out=out)
    check_flat(num_blocks(q.numel(), block), absmax=absmax)
    if out is None:
        out = torch.empty(q.numel(), dtype=torch.float32, device=q.device)
    if not use_triton(q.device):
        return out.copy_(dequantise_torch(q, absmax, code, block))
    if q.numel():
        count = num_blocks(q.numel(), block)
        _dequantise[(count,)](q, absmax, code, out, q.numel(), BLOCK=block)
    return out


def middles(code: Tensor) -> Tensor:
    """Return the 255 values at which the nearest code changes; ties go to the lower code."""
    return (code[1:] + code[:-1]) / 2


def quantise_torch(x: Tensor, code: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Compute the formula in plain torch: the kernel's oracle, and the form that runs on a CPU."""
    rows = _rows(x.float(), block)
    absmax = rows.abs().amax(1)
    scaled = rows / torch.where(absmax > 0, absmax, 1.0)[:, None]
    q = torch.bucketize(scaled, middles(code)).to(torch.uint8)
    return q.view(-1)[: x.numel()].clone(), absmax


def dequantise_torch(q: Tensor, absmax: Tensor, code: Tensor, block: int) -> Tensor:
    rows = _rows(q, block)
    return (code[rows.long()] * absmax[:, None]).view(-1)[: q.numel()]


def _rows(x: Tensor, block: int) -> Tensor:
    missing = -x.numel() % block
    return torch.nn.functional.pad(x, (0, missing)).view(-1, block)


@kernel
def _quantise(x, middles, q, absmax, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=0)
    tl.store(absmax + block, largest)
    value = value / tl.where(largest > 0, largest, 1.0)
    # the number of middles below the value, by a binary search of 8 steps
    low = tl.zeros([BLOCK], dtype=tl.int32)
    for step in tl.static_range(8):
        is_above = tl.load(middles + low + (128 >> step) - 1) < value
        low += tl.where(is_above, 128 >> step, 0)
    tl.store(q + at, low.to(tl.uint8), mask=inside)


@kernel
def _dequantise(q, absmax, code, out, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    index = tl.load(q + at, mask=inside, other=0).to(tl.int32)
    value = tl.load(code + index) * tl.load(absmax + block)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
