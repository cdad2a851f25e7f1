"""Lamb over flat runs: Adam's update, scaled for each parameter by a trust ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.compat.optim import foreach_mul_, fused_adam_
from zerofx.compat.tensors import foreach_norm
from zerofx.kernels.lamb import (
    LambRule,
    flat_lamb_apply_,
    flat_lamb_direction,
    trust_ratios,
)
from zerofx.kernels.launch import use_triton
from zerofx.optim.flat import FlatOptimizer, near
from zerofx.optim.groups import check_adam_options, resolve_groups
from zerofx.optim.runs import FlatRun, Work, overlaps, parts
from zerofx.runtime.tensors.norms import LOW_PRECISION
from zerofx.runtime.tensors.piece import ParameterPiece, over_parts, piece_of

_NEVER_CORRECTED = torch.tensor(1e12)  # a step count at which beta^step is 0
Groups = Sequence[tuple[dict[str, Any], Work]]


class Lamb(FlatOptimizer):
    """p -= lr r u,  u = m^ / (sqrt(v^) + eps) + weight_decay p,  r = |p| / |u| within its bounds.

    m and v are Adam's averages, "exp_avg" and "exp_avg_sq"; m^ and v^ are divided by 1 - beta^step,
    or are m and v themselves without `bias_correction`. The norms are those of whole parameters,
    summed over all ranks in one exchange. r is clamped to [min_coeff, max_coeff], and is 1 if |p|
    or |u| is 0. The recipe of DeepSpeed's BERT pre-training: lr=4e-3, weight_decay=0.01,
    max_grad_norm=1.0, max_coeff=0.5, min_coeff=0.08, bias_correction=False.

    On CPU, u is not kept but computed twice, before and after the norms are known: a step needs
    temporaries of a few hundred KiB. The kernels on CUDA leave u in the gradients' memory.

    Raises:
        OptimizerError: a parameter is float16 without a float32 master copy.

    Source: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv 1904.00962), Algorithm 2.
    """

    communicates = True  # the norm of a parameter is over all ranks

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        max_grad_norm: float | None = None,
    ) -> None:
        check_adam_options(lr, betas, weight_decay, eps)
        if eps == 0.0:
            raise ValueError(
                "eps is 0.0: u would be 0 / 0 for elements that never had a gradient. Raise eps."
            )
        if not 0.0 <= min_coeff <= max_coeff:
            raise ValueError(
                f"min_coeff is {min_coeff} and max_coeff is {max_coeff}, but trust ratios are "
                "clamped to [min_coeff, max_coeff]. Give 0 <= min_coeff <= max_coeff."
            )
        self._begin(max_grad_norm)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(resolve_groups(params), defaults)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update_groups(self, work: Groups, scale: Tensor | None) -> None:
        rows = _rows(work)
        if not rows:
            return
        squares = torch.zeros(len(rows), 2, dtype=torch.float64, device=next(iter(rows)).device)
        for group, pairs in work:
            for run, grad in pairs:
                if run.numel:
                    mine = torch.tensor([rows[p] for p in run.params], device=squares.device)
                    found = _direction_norms(group, run, grad, near(scale, run))
                    squares.index_add_(0, mine, found.to(squares.device))
        _sum_over_ranks(rows, squares)
        for group, pairs in work:
            for run, grad in pairs:
                if run.numel:
                    mine = squares[[rows[p] for p in run.params]].to(run.param.device)
                    if use_triton(run.param.device):
                        _apply_kernel(group, run, grad, mine, self.cast_place(run))
                    else:
                        _apply(group, run, mine)


def _rows(work: Groups) -> dict[Tensor, int]:
    """Number the parameters of a step in the order of the groups, which is equal on all ranks."""
    found: dict[Tensor, int] = {}
    for group, pairs in work:
        stepped = {id(p) for run, _ in pairs for p in run.params}
        for param in group["params"]:
            if id(param) in stepped:
                found[param] = len(found)
    return found


def _sum_over_ranks(rows: dict[Tensor, int], squares: Tensor) -> None:
    """Replace each sharded parameter's sums of squares by the sums over all ranks that share it.

    There is one exchange per model and axis. Ranks that own no element take part in it.
    """
    sharded: dict[int, list[ParameterPiece]] = {}
    numbers: dict[int, list[int]] = {}
    for param, number in rows.items():
        piece = piece_of(param)
        if piece is not None and piece.is_cut:
            sharded.setdefault(id(piece.ledger), []).append(piece)
            numbers.setdefault(id(piece.ledger), []).append(number)
    for model, pieces in sharded.items():
        mine = numbers[model]
        local = squares[mine].view(-1)
        whole = pieces[0].gather_partials(local, "the norms of Lamb's trust ratios").sum(0)
        both = [piece for piece in pieces for _ in range(2)]  # the columns of `squares`
        squares[mine] = over_parts(both, whole, lambda found: found.sum(0)).view(-1, 2)


# -- one run, by the kernels of zerofx or part by part --------------------------------------------
def _direction_norms(
    group: dict[str, Any], run: FlatRun, grad: Tensor, scale: Tensor | None
) -> Tensor:
    """Update m and v; return this rank's sums of p^2 and u^2, float64 [parameters, 2]."""
    beta1, beta2 = group["betas"]
    if use_triton(run.param.device):
        rule = LambRule(
            beta1, beta2, group["eps"], group["weight_decay"], int(run.steps[0]),
            group["bias_correction"],
        )  # fmt: skip
        norms = flat_lamb_direction(
            run.param, grad, *_moments(run), _edges(run), rule, update=grad, grad_scale=scale
        )
        return norms.double()
    step = run.steps[0] if group["bias_correction"] else _NEVER_CORRECTED
    squares = torch.zeros(len(run.params), 2, dtype=torch.float64, device=run.param.device)
    for start, stop in parts(run.param):
        m, v = (t[start:stop] for t in _moments(run))
        u = torch.zeros_like(m)
        # with rate 1 and parameter 0, torch's fused Adam gives -m^ / (sqrt(v^) + eps)
        fused_adam_(
            [u], [grad[start:stop]], [m], [v], [], [step.to(u.device)],
            lr=1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=scale,
        )  # fmt: skip
        param = run.param[start:stop]
        u.sub_(param, alpha=group["weight_decay"])
        found = list(overlaps(run.bounds, start, stop))
        pieces = [t[a:b] for _, a, b in found for t in (param, u)]
        dtype = torch.float32 if u.dtype in LOW_PRECISION else None
        norms = torch.stack(foreach_norm(pieces, dtype=dtype)).double().square()
        squares[[number for number, _, _ in found]] += norms.view(-1, 2)
    return squares


def _apply_kernel(
    group: dict[str, Any], run: FlatRun, update: Tensor, squares: Tensor, lowp: Tensor | None
) -> None:
    """Update a run's parameters as `_apply` does, with the kernel and the u that it has kept."""
    flat_lamb_apply_(
        run.param, update, _edges(run), squares.float(), lr=float(group["lr"]),
        max_coeff=group["max_coeff"], min_coeff=group["min_coeff"], lowp=lowp,
    )  # fmt: skip


def _apply(group: dict[str, Any], run: FlatRun, squares: Tensor) -> None:
    """Update a run's parameters, each with its trust ratio; squares [parameters, 2] are global."""
    lr, bounds = float(group["lr"]), (group["max_coeff"], group["min_coeff"])
    factors = (lr * trust_ratios(squares, *bounds)).to(run.param.dtype).unbind()
    for start, stop in parts(run.param):
        u = _direction(group, run, start, stop)
        found = list(overlaps(run.bounds, start, stop))
        foreach_mul_([u[a:b] for _, a, b in found], [factors[n] for n, _, _ in found])
        run.param[start:stop].sub_(u)


def _moments(run: FlatRun) -> tuple[Tensor, Tensor]:
    return run.states["exp_avg"], run.states["exp_avg_sq"]


def _edges(run: FlatRun) -> Tensor:
    """Return the start of each parameter, and the end; padding belongs to the one before it."""
    edges = [*(start for start, _ in run.bounds), run.numel]
    return torch.tensor(edges, device=run.param.device)


def _direction(group: dict[str, Any], run: FlatRun, start: int, stop: int) -> Tensor:
    """Compute u for a part of a run, as a new tensor."""
    m, v = (t[start:stop] for t in _moments(run))
    u = v.sqrt()
    eps = group["eps"]
    if group["bias_correction"]:
        step, (beta1, beta2) = float(run.steps[0]), group["betas"]
        # both corrections in one factor: m^ / (sqrt(v^) + eps) = m / (c sqrt(v) + c1 eps)
        c1 = 1 - beta1**step
        u.mul_(c1 / math.sqrt(1 - beta2**step))
        eps = c1 * eps
    torch.div(m, u.add_(eps), out=u)
    if group["weight_decay"]:
        u.add_(run.param[start:stop], alpha=group["weight_decay"])
    return u
