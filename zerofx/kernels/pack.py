"""Packing gradients into a flat buffer: cast, scale, square norm and finite check in one pass.

    buffer[o : o + n] = scale * grad, rounded to the buffer's dtype
    stats[0] += sum of (scale * grad)^2,   stats[1] += 1 for each block that holds an inf or NaN

Source: the multi-tensor unscale and norm of NVIDIA Apex, joined with the copy into the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.kernels.launch import check_flat, kernel, num_blocks, use_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 2048


def pack_grads_(
    buffer: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    *,
    scale: Tensor | float = 1.0,
    stats: Tensor | None = None,
) -> Tensor:
    """Write gradients to their offsets in `buffer`; return their statistics.

    Args:
        offsets: the first element of each gradient in the buffer; gaps between them are unchanged.
        stats: fp32 [2] on the same device, to which results are added; a new one by default.

    Shapes: buffer [numel]; gradients of any shape and strides, read in row-major order.

    Returns:
        fp32 [2]: the square norm of the scaled gradients; nonzero if any element is not finite.

    Raises:
        ValueError: a gradient does not fit into the buffer at its offset.
    """
    check_flat(buffer.numel(), buffer=buffer)
    for grad, offset in zip(grads, offsets, strict=True):
        if offset < 0 or offset + grad.numel() > buffer.numel():
            raise ValueError(
                f"a gradient of shape {list(grad.shape)} at offset {offset} does not fit into a "
                f"buffer of {buffer.numel()} elements."
            )
    if stats is None:
        stats = torch.zeros(2, dtype=torch.float32, device=buffer.device)
    if use_triton(buffer.device):
        _launch(buffer, grads, offsets, scale, stats)
    else:
        pack_torch_(buffer, grads, offsets, scale, stats)
    return stats


def pack_torch_(
    buffer: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    scale: Tensor | float,
    stats: Tensor,
) -> None:
    """Compute the formula in plain torch: the kernel's oracle, and the form that runs on a CPU."""
    is_plain = not isinstance(scale, Tensor) and scale == 1.0
    for grad, offset in zip(grads, offsets, strict=True):
        scaled = grad.float() if is_plain else grad.float() * scale
        buffer.narrow(0, offset, grad.numel()).view(grad.shape).copy_(scaled)
        # vector_norm, because it needs no temporary of squares
        square = torch.linalg.vector_norm(scaled).square()
        stats[0] += square
        # look again only if the sum is not finite: the squares of finite values may overflow
        if not bool(square.isfinite()):
            stats[1] += (~scaled.isfinite()).any()


def _launch(
    buffer: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    scale: Tensor | float,
    stats: Tensor,
) -> None:
    counts = [num_blocks(g.numel(), BLOCK) for g in grads]
    # one row per block, summed at once: atomics would add in any order
    sums = torch.empty(sum(counts), 2, dtype=torch.float32, device=buffer.device)
    is_tensor = isinstance(scale, Tensor)
    row = 0
    for grad, offset, count in zip(grads, offsets, counts, strict=True):
        if count:
            _pack[(count,)](
                buffer.narrow(0, offset, grad.numel()), grad.contiguous(), sums[row:],
                scale if is_tensor else grad, 1.0 if is_tensor else float(scale), grad.numel(),
                HAS_SCALE_TENSOR=is_tensor, BLOCK=BLOCK,
            )  # fmt: skip
        row += count
    stats += sums.sum(0)


@kernel
def _pack(  # type: ignore[no-untyped-def]
    buffer, grad, sums, scale_tensor, scale, numel,
    HAS_SCALE_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    if HAS_SCALE_TENSOR:
        scale = tl.load(scale_tensor).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(buffer + at, g.to(buffer.dtype.element_ty), mask=inside)
    # neither an inf nor a NaN has a magnitude below infinity
    is_bad = tl.where(tl.abs(g) < float("inf"), 0.0, 1.0)
    tl.store(sums + 2 * block, tl.sum(g * g, axis=0))
    tl.store(sums + 2 * block + 1, tl.max(is_bad, axis=0))
