"""Fused optimizer steps over lists of tensors, which have no public names, and clipping.

The fused kernels take a `grad_scale` to divide gradients by, and write the quotient back into the
gradients. On CPU that costs a store of the gradient's size, so None is passed if there is no scale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

import torch

# (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, *, lr, beta1, beta2, weight_decay,
# eps, amsgrad, maximize, grad_scale=None, found_inf=None); `steps` already count this step
fused_adam_: Callable[..., None] = torch._fused_adam_

fused_adamw_: Callable[..., None] = torch._fused_adamw_

# (params, grads, momentum_buffers, *, weight_decay, momentum, lr, dampening, nesterov, maximize,
# is_first_step, grad_scale=None, found_inf=None); no buffers where momentum is 0
fused_sgd_: Callable[..., None] = torch._fused_sgd_

fused_adagrad_: Callable[..., None] = torch._fused_adagrad_

foreach_add_: Callable[..., None] = torch._foreach_add_

foreach_mul_: Callable[..., None] = torch._foreach_mul_


def foreach_names(names: Iterable[str], *, in_place: bool = False) -> list[str]:
    """Return torch's names of its functions over lists of tensors: "add" -> "_foreach_add"."""
    return [f"_foreach_{name}{'_' if in_place else ''}" for name in names]


# torch wraps it, and marks the wrapper as functools does
_CLIPPING: CodeType = torch.nn.utils.clip_grad_norm_.__wrapped__.__code__  # type: ignore[attr-defined]


def is_clipping() -> bool:
    """Return whether torch's clip_grad_norm_, which divides by the norm, runs on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CLIPPING:
        frame = frame.f_back
    return frame is not None
