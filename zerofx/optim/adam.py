"""Adam and AdamW over flat runs.

Sources: Adam (arXiv 1412.6980), AdamW (arXiv 1711.05101), AMSGrad (arXiv 1904.09237).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofx.compat.optim import fused_adam_, fused_adamw_
from zerofx.errors import OptimizerError
from zerofx.kernels.adamw import flat_adamw_
from zerofx.kernels.launch import use_triton
from zerofx.optim.codes import EightBitStates, decoded_parts
from zerofx.optim.flat import FlatOptimizer
from zerofx.optim.groups import resolve_groups
from zerofx.optim.runs import FlatRun, Work, name_of


class _FlatAdam(FlatOptimizer):
    """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  p -= lr m^ / (sqrt(v^) + eps).

    m^ and v^ are divided by 1 - beta^step. Weight decay is added to the gradient, or, with
    `decoupled_weight_decay`, subtracted from the parameter: p -= lr weight_decay p.
    """

    def _set_state_bits(self, state_bits: int) -> None:
        if state_bits not in (8, 32):
            raise OptimizerError(f"state_bits is {state_bits}, but states have 8 or 32 bits.")
        if state_bits == 8:
            self.states_type = EightBitStates

    @property
    def state_bits(self) -> int:
        return 8 if self.states_type is EightBitStates else 32

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.state_bits != 8:
            return
        group = self.param_groups[-1]
        for param in group["params"]:
            if param.dtype != torch.float32:
                raise OptimizerError(
                    f"{name_of(param)} is {param.dtype}, but state_bits=8 decodes its states to "
                    "float32. Keep a float32 master copy (Plan(precision=...)), or use 32 bits."
                )
        if group["amsgrad"]:
            raise OptimizerError(
                f"{type(self).__name__}: state_bits=8 keeps no maxima of second moments. Leave out "
                "amsgrad or state_bits."
            )

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        extra = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *extra)

    def update(self, group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
        if self.state_bits == 8:
            for run, grad in work:
                for part, store in decoded_parts(run, grad):
                    self._update_dense(group, part, scale)
                    store()
        else:
            self._update_dense(group, work, scale)

    def _update_dense(self, group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
        if use_triton(work[0][0].param.device) and not (group["amsgrad"] or group["maximize"]):
            for run, grad in work:
                _update_run(group, run, grad, scale, self.cast_place(run))
        else:
            _update_fused(group, work, scale)


def _update_run(
    group: dict[str, Any], run: FlatRun, grad: Tensor, scale: Tensor | None, lowp: Tensor | None
) -> None:
    """Update one run with the kernel of zerofx."""
    beta1, beta2 = group["betas"]
    flat_adamw_(
        run.param,
        grad,
        run.states["exp_avg"],
        run.states["exp_avg_sq"],
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=int(run.steps[0]),
        grad_scale=scale,
        adam_w_mode=group["decoupled_weight_decay"],
        lowp=lowp,
    )


def _update_fused(group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
    """Update runs with torch's fused kernel: on CPU, without Triton, and for amsgrad, maximize."""
    beta1, beta2 = group["betas"]
    kernel = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
    kernel(
        [run.param for run, _ in work],
        [grad for _, grad in work],
        [run.states["exp_avg"] for run, _ in work],
        [run.states["exp_avg_sq"] for run, _ in work],
        [run.states["max_exp_avg_sq"] for run, _ in work] if group["amsgrad"] else [],
        [run.steps[0].to(run.param.device, non_blocking=True) for run, _ in work],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=scale,
    )


class Adam(_FlatAdam, torch.optim.Adam):
    """torch.optim.Adam over flat runs; `max_grad_norm` clips the global norm within the update.

    `state_bits=8` keeps both moments in 8 bits (zerofx/optim/codes.py), a quarter of the memory.
    `state_dict()`, save and load convert them to float32, one parameter or all of them at a time.

    `foreach`, `fused` and `capturable` choose among torch's implementations and are kept only for
    state_dict(): a step here is always fused, and counts steps on the host.

    Raises:
        OptimizerError: a parameter is float16 without a float32 master copy; state_bits is neither
            8 nor 32, or is 8 with amsgrad or with parameters that are not float32.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        state_bits: int = 32,
    ) -> None:
        self._begin(max_grad_norm)
        self._set_state_bits(state_bits)
        torch.optim.Adam.__init__(
            self,
            resolve_groups(params),
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(_FlatAdam, torch.optim.AdamW):
    """torch.optim.AdamW over flat runs; everything else as in Adam."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        state_bits: int = 32,
    ) -> None:
        self._begin(max_grad_norm)
        self._set_state_bits(state_bits)
        torch.optim.AdamW.__init__(
            self,
            resolve_groups(params),
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
