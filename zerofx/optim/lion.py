"""Lion over flat runs: the sign of an interpolated gradient, with one state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofx.optim.flat import FlatOptimizer
from zerofx.optim.groups import check_adam_options, resolve_groups
from zerofx.optim.runs import Work, parts


class Lion(FlatOptimizer):
    """p -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay p);  then m = beta2 m + (1 - beta2) g.

    States: "exp_avg" (m). Every element changes by lr, so learning rates are 3 to 10 times smaller
    than AdamW's, and weight decay is larger by the same factor.

    Raises:
        OptimizerError: a parameter is float16 without a float32 master copy.

    Source: "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), Algorithm 2.
    """

    counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        check_adam_options(lr, betas, weight_decay)
        self._begin(max_grad_norm)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(resolve_groups(params), defaults)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for run, grad in work:
            for start, stop in parts(run.param):
                param, m = run.param[start:stop], run.states["exp_avg"][start:stop]
                g = grad[start:stop] if scale is None else grad[start:stop] / scale
                sign = torch.mul(m, beta1).add_(g, alpha=1 - beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(sign, alpha=-lr)
                m.mul_(beta2).add_(g, alpha=1 - beta2)
