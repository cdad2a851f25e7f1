"""SGD with momentum over flat runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofx.compat.optim import fused_sgd_
from zerofx.optim.flat import FlatOptimizer
from zerofx.optim.groups import resolve_groups
from zerofx.optim.runs import FlatRun, Work, parts
from zerofx.runtime.tensors.norms import LOW_PRECISION


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD over flat runs; `max_grad_norm` clips the global norm within the update.

    b = momentum b + (1 - dampening) g (b = g in the first step);  p -= lr (g + momentum b if
    nesterov else b). `foreach` and `fused` are kept only for state_dict().

    Source: "On the importance of initialization and momentum in deep learning" (ICML 2013).
    """

    counts_steps = False
    takes_half = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._begin(max_grad_norm)
        torch.optim.SGD.__init__(
            self,
            resolve_groups(params),
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
        for is_first in (True, False):
            part = [(run, grad) for run, grad in work if run.is_first is is_first]
            if not part:
                continue
            if part[0][0].param.dtype in LOW_PRECISION and part[0][0].param.device.type == "cpu":
                for run, grad in part:
                    _update_low_precision(group, run, grad, scale)
            else:
                self._update_part(group, part, scale, is_first)

    def _update_part(
        self, group: dict[str, Any], work: Work, scale: Tensor | None, is_first: bool
    ) -> None:
        momentum = group["momentum"]
        fused_sgd_(
            [run.param for run, _ in work],
            [grad for _, grad in work],
            [run.states["momentum_buffer"] for run, _ in work] if momentum else [],
            weight_decay=group["weight_decay"],
            momentum=momentum,
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=is_first and bool(momentum),
            grad_scale=scale,
        )


def _update_low_precision(
    group: dict[str, Any], run: FlatRun, grad: Tensor, scale: Tensor | None
) -> None:
    """Update a run of 16-bit floats on CPU, rounding only once.

    torch's fused CPU kernel (2.11 to 2.13) updates only the last few elements of such a tensor.
    """
    for start, stop in parts(run.param):
        param = run.param[start:stop]
        p, g = param.float(), grad[start:stop].float()
        if scale is not None:
            g = g / scale
        if group["maximize"]:
            g = -g
        if group["weight_decay"]:
            g = g.add(p, alpha=group["weight_decay"])
        if group["momentum"]:
            held = run.states["momentum_buffer"][start:stop]
            b = g
            if not run.is_first:
                b = held.float().mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
            held.copy_(b)
            g = g.add(b, alpha=group["momentum"]) if group["nesterov"] else b
        param.copy_(p.sub_(g.mul(group["lr"])))
