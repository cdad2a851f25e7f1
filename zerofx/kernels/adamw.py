"""Flat AdamW: unscale, clip, update and cast in one pass over memory.

    g = grad / grad_scale
    p = p - lr * weight_decay * p                 (AdamW; Adam adds weight_decay * p to g instead)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    lowp = p, rounded to its dtype

`grad_scale` is the divisor of the gradient: the loss scale, the factor of the clip, or both.
Arithmetic is in fp32 for every dtype of the tensors.

Source: Adam (arXiv 1412.6980), algorithm 1; decoupled weight decay (arXiv 1711.05101); the form of
    torch.optim.AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.kernels.launch import check_flat, kernel, num_blocks, use_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # elements per program: two 16-byte loads by each of 128 threads
CHUNK = 1 << 20  # elements of a temporary in the torch form


@dataclass(frozen=True)
class Rule:
    """The scalars of one step, known on the host."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    adam_w_mode: bool = True

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias2_sqrt(self) -> float:
        return math.sqrt(1 - self.beta2**self.step)


def flat_adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: Tensor | float | None = None,
    adam_w_mode: bool = True,
    lowp: Tensor | None = None,
) -> None:
    """Run one step of AdamW (or Adam) on flat memory, in place.

    Args:
        step: the number of this step; the first is 1.
        grad_scale: the divisor of the gradient, whose own memory is not changed.
        lowp: receives the new parameter, rounded to its dtype.

    Shapes: every tensor [numel]; `param`, `exp_avg`, `exp_avg_sq` of one dtype.

    Raises:
        ValueError: a tensor is not flat or has another length.
    """
    check_flat(
        param.numel(), param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, lowp=lowp
    )
    rule = Rule(lr, beta1, beta2, eps, weight_decay, step, adam_w_mode)
    if not param.numel():
        return
    if use_triton(param.device):
        _launch(param, grad, exp_avg, exp_avg_sq, rule, grad_scale, lowp)
    else:
        adamw_torch_(param, grad, exp_avg, exp_avg_sq, rule, grad_scale, lowp)


def adamw_torch_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rule: Rule,
    grad_scale: Tensor | float | None = None,
    lowp: Tensor | None = None,
) -> None:
    """Compute the formula in plain torch, in chunks, for any mix of dtypes: the kernel's oracle."""
    pieces = [t.split(CHUNK) for t in (param, grad, exp_avg, exp_avg_sq)]
    lows = lowp.split(CHUNK) if lowp is not None else [None] * len(pieces[0])
    for p, g, m, v, low in zip(*pieces, lows, strict=True):
        new_p, new_g = p.float(), g.float()
        if grad_scale is not None:
            new_g = new_g / grad_scale
        if rule.adam_w_mode:
            new_p = new_p * (1 - rule.lr * rule.weight_decay)
        elif rule.weight_decay:
            new_g = new_g + rule.weight_decay * new_p
        new_m = torch.lerp(m.float(), new_g, 1 - rule.beta1)
        new_v = rule.beta2 * v.float() + (1 - rule.beta2) * new_g * new_g
        new_p = new_p - rule.step_size * new_m / (new_v.sqrt() / rule.bias2_sqrt + rule.eps)
        for old, new in ((p, new_p), (m, new_m), (v, new_v)):
            old.copy_(new)
        if low is not None:
            low.copy_(p)


def _launch(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rule: Rule,
    grad_scale: Tensor | float | None,
    lowp: Tensor | None,
) -> None:
    is_tensor = isinstance(grad_scale, Tensor)
    _adamw[(num_blocks(param.numel(), BLOCK),)](
        param, grad, exp_avg, exp_avg_sq,
        lowp if lowp is not None else param,
        grad_scale if is_tensor else param,
        1.0 if grad_scale is None or is_tensor else float(grad_scale),
        param.numel(), rule.lr * rule.weight_decay, rule.weight_decay,
        1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.step_size, rule.bias2_sqrt,
        IS_ADAMW=rule.adam_w_mode, HAS_SCALE_TENSOR=is_tensor,
        HAS_LOWP=lowp is not None, BLOCK=BLOCK,
    )  # fmt: skip


@kernel
def _adamw(  # type: ignore[no-untyped-def]
    param, grad, exp_avg, exp_avg_sq, lowp, scale_tensor, scale, numel,
    decay, weight_decay, weight1, beta2, weight2, eps, step_size, bias2_sqrt,
    IS_ADAMW: tl.constexpr, HAS_SCALE_TENSOR: tl.constexpr, HAS_LOWP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # 64-bit: a shard may hold more than 2^31 elements
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    if HAS_SCALE_TENSOR:
        scale = tl.load(scale_tensor).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / scale
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    if IS_ADAMW:
        p -= decay * p
    else:
        g += weight_decay * p
    m += weight1 * (g - m)  # 1 - beta is computed on the host, where it is exact
    v = beta2 * v + weight2 * g * g
    p -= step_size * m / (tl.sqrt(v) / bias2_sqrt + eps)
    p = p.to(param.dtype.element_ty)  # so that the copy is rounded from the stored value
    tl.store(param + at, p, mask=inside)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if HAS_LOWP:
        tl.store(lowp + at, p.to(lowp.dtype.element_ty), mask=inside)
