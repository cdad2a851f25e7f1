"""Flat LAMB in two phases: Adam's direction, then a step per parameter scaled by its trust ratio.

Phase 1, over flat memory, for every element of segment s (one parameter):

    g = grad / grad_scale
    m = beta1 * m + (1 - beta1) * g,   v = beta2 * v + (1 - beta2) * g^2
    u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay * p
    c1 = 1 - beta1^t, c2 = 1 - beta2^t with bias correction, else 1
    norms[s] = (sum of p^2, sum of u^2)

Between the phases, the caller sums the norms of a parameter's pieces over the ranks that hold them.
Phase 2:

    ratio[s] = clamp(||p|| / ||u||, min_coeff, max_coeff), 1 where either norm is 0
    p = p - lr * ratio[s] * u
    lowp = p, rounded to its dtype

Source: LAMB (arXiv 1904.00962), algorithm 2; max_coeff, min_coeff and the bias correction switch
    as in DeepSpeed's BERT recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.kernels.launch import check_flat, kernel, use_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024


@dataclass(frozen=True)
class LambRule:
    """The scalars of phase 1 of one step; the first step is 1."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    bias_correction: bool = True

    @property
    def corrections(self) -> tuple[float, float]:
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step


def flat_lamb_direction(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    bounds: Tensor,
    rule: LambRule,
    *,
    update: Tensor,
    grad_scale: Tensor | float | None = None,
) -> Tensor:
    """Run phase 1: update the moments, write the direction to `update`, return square norms.

    Shapes: flat tensors [numel]; bounds int64 [segments + 1] on the same device, ascending from
        0 to numel (equal neighbours: an empty segment); the result fp32 [segments, 2] holds the
        squares of p and of u. `update` may share the gradient's memory.

    Raises:
        ValueError: a tensor is not flat or has another length.
    """
    numel = param.numel()
    check_flat(numel, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, update=update)
    given = (param, grad, exp_avg, exp_avg_sq, bounds, rule)
    if not use_triton(param.device):
        return direction_torch(*given, update, grad_scale)
    grid = _grid(bounds, numel)
    sums = torch.empty(*grid, 2, dtype=torch.float32, device=param.device)
    is_tensor = isinstance(grad_scale, Tensor)
    correction1, correction2 = rule.corrections
    _direction[grid](
        param, grad, exp_avg, exp_avg_sq, update, bounds, sums,
        grad_scale if is_tensor else param,
        1.0 if grad_scale is None or is_tensor else float(grad_scale),
        1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.weight_decay,
        correction1, correction2,
        HAS_SCALE_TENSOR=is_tensor, BLOCK=BLOCK,
    )  # fmt: skip
    return sums.sum(1)  # of partial sums: atomics would add in any order and change the bits


def flat_lamb_apply_(
    param: Tensor,
    update: Tensor,
    bounds: Tensor,
    norms: Tensor,
    *,
    lr: float,
    max_coeff: float,
    min_coeff: float,
    lowp: Tensor | None = None,
) -> Tensor:
    """Run phase 2 in place: step each segment, scaled by its trust ratio; return the ratios.

    Shapes: as `flat_lamb_direction`; norms [segments, 2], already summed over the ranks; the
        result fp32 [segments].
    """
    numel = param.numel()
    check_flat(numel, param=param, update=update, lowp=lowp)
    ratios = trust_ratios(norms, max_coeff, min_coeff)
    if not use_triton(param.device):
        apply_torch_(param, update, bounds, ratios, lr, lowp)
        return ratios
    _apply[_grid(bounds, numel)](
        param, update, bounds, ratios, lowp if lowp is not None else param, lr,
        HAS_LOWP=lowp is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return ratios


def trust_ratios(norms: Tensor, max_coeff: float, min_coeff: float) -> Tensor:
    """Return ||p|| / ||u|| of each segment, clamped to its limits; 1 if either norm is 0."""
    weight, update = norms.sqrt().unbind(1)
    ratio = (weight / update).clamp(min_coeff, max_coeff)
    return torch.where((weight > 0) & (update > 0), ratio, torch.ones_like(ratio))


# -- plain torch: the oracle, and the form that runs on a CPU --------------------------------------
def direction_torch(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    bounds: Tensor,
    rule: LambRule,
    update: Tensor,
    grad_scale: Tensor | float | None = None,
) -> Tensor:
    """Run phase 1 segment by segment."""
    norms = torch.zeros(bounds.numel() - 1, 2, dtype=torch.float32, device=param.device)
    correction1, correction2 = rule.corrections
    edges = bounds.tolist()
    for s, (start, end) in enumerate(pairwise(edges)):
        p, g = param[start:end].float(), grad[start:end].float()
        m, v = exp_avg[start:end], exp_avg_sq[start:end]
        if grad_scale is not None:
            g = g / grad_scale
        new_m = torch.lerp(m.float(), g, 1 - rule.beta1)
        new_v = rule.beta2 * v.float() + (1 - rule.beta2) * g * g
        u = (new_m / correction1) / ((new_v / correction2).sqrt() + rule.eps)
        u = u + rule.weight_decay * p
        for old, new in ((m, new_m), (v, new_v)):
            old.copy_(new)
        update[start:end].copy_(u)
        norms[s, 0], norms[s, 1] = p.square().sum(), u.square().sum()
    return norms


def apply_torch_(
    param: Tensor,
    update: Tensor,
    bounds: Tensor,
    ratios: Tensor,
    lr: float,
    lowp: Tensor | None = None,
) -> None:
    """Run phase 2 segment by segment."""
    edges = bounds.tolist()
    for s, (start, end) in enumerate(pairwise(edges)):
        old = param[start:end]
        old.copy_(old.float() - lr * ratios[s] * update[start:end].float())
    if lowp is not None:
        lowp.copy_(param)


# -- Triton: a row of programs strides through each segment ----------------------------------------
def _grid(bounds: Tensor, numel: int) -> tuple[int, int]:
    segments = bounds.numel() - 1
    across = min(max(numel // (BLOCK * max(segments, 1)), 1), 256)
    return segments, across


@kernel
def _direction(  # type: ignore[no-untyped-def]
    param, grad, exp_avg, exp_avg_sq, update, bounds, sums, scale_tensor, scale,
    weight1, beta2, weight2, eps, weight_decay, correction1, correction2,
    HAS_SCALE_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    start = tl.load(bounds + segment)
    end = tl.load(bounds + segment + 1)
    if HAS_SCALE_TENSOR:
        scale = tl.load(scale_tensor).to(tl.float32)
    sum_p = tl.zeros([BLOCK], dtype=tl.float32)
    sum_u = tl.zeros([BLOCK], dtype=tl.float32)
    offset = start + tl.program_id(1).to(tl.int64) * BLOCK
    while offset < end:
        at = offset + tl.arange(0, BLOCK)
        inside = at < end
        p = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / scale
        m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
        m += weight1 * (g - m)
        v = beta2 * v + weight2 * g * g
        u = (m / correction1) / (tl.sqrt(v / correction2) + eps) + weight_decay * p
        tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
        tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
        tl.store(update + at, u.to(update.dtype.element_ty), mask=inside)
        sum_p += tl.where(inside, p * p, 0.0)
        sum_u += tl.where(inside, u * u, 0.0)
        offset += tl.num_programs(1) * BLOCK
    mine = sums + 2 * (segment * tl.num_programs(1) + tl.program_id(1))
    tl.store(mine, tl.sum(sum_p, axis=0))
    tl.store(mine + 1, tl.sum(sum_u, axis=0))


@kernel
def _apply(  # type: ignore[no-untyped-def]
    param, update, bounds, ratios, lowp, lr,
    HAS_LOWP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    start = tl.load(bounds + segment)
    end = tl.load(bounds + segment + 1)
    step = lr * tl.load(ratios + segment)
    offset = start + tl.program_id(1).to(tl.int64) * BLOCK
    while offset < end:
        at = offset + tl.arange(0, BLOCK)
        inside = at < end
        p = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        new = (p - step * u).to(param.dtype.element_ty)  # the copy is rounded from this value
        tl.store(param + at, new, mask=inside)
        if HAS_LOWP:
            tl.store(lowp + at, new.to(lowp.dtype.element_ty), mask=inside)
        offset += tl.num_programs(1) * BLOCK
