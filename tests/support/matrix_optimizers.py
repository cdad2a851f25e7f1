"""Optimizers as third parties write them: for whole matrices, without a thought of shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Shampoo(torch.optim.Optimizer):
    """One preconditioner per dimension, each a matrix of its own (arXiv 1802.09568)."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = grad.clone()
                    for dim, size in enumerate(grad.shape):
                        state[f"precond_{dim}"] = 0.1 * torch.eye(size)
                        state[f"inverse_{dim}"] = torch.zeros(size, size)
                grad = torch.lerp(grad, state["momentum"], group["momentum"])
                state["momentum"] = grad.clone()
                shape = grad.shape
                for dim, size in enumerate(shape):
                    flat = grad.transpose(0, dim).reshape(size, -1)
                    state[f"precond_{dim}"] += flat @ flat.T
                    if state["step"] % group["every"] == 0:
                        values, vectors = torch.linalg.eigh(state[f"precond_{dim}"])
                        power = vectors * values.clamp(min=1e-6) ** (-1 / (2 * len(shape)))
                        state[f"inverse_{dim}"].copy_(power @ vectors.T)
                    grad = (state[f"inverse_{dim}"] @ flat).view(size, *flat.shape[1:])
                    grad = grad.reshape(shape if dim == 0 else shape[::-1]).transpose(0, dim)
                state["step"] += 1
                p.add_(grad.reshape(shape), alpha=-group["lr"])
        return loss


class Soap(torch.optim.Optimizer):
    """Adam in the eigenbases of Shampoo's preconditioners (arXiv 2409.11321).

    Its states are lists of matrices, and it counts steps in its groups and on itself.
    """

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.95)):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8})
        self.count = 0
        self.made: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, p.grad)

    def _update(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        state, (beta, beta2) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["GG"] = [torch.zeros(n, n) for n in p.shape]
            state["Q"] = [torch.eye(n) for n in p.shape]
            self.made.append(p.numel())
        for dim, gram in enumerate(state["GG"]):
            flat = grad.transpose(0, dim).reshape(grad.shape[dim], -1)
            gram.lerp_(flat @ flat.T, 1 - beta2)
        if self.count % 2 == 1:
            state["Q"] = [torch.linalg.eigh(gram)[1] for gram in state["GG"]]
        state["exp_avg"].lerp_(grad, 1 - beta)
        turned, mean = _turned(grad, state["Q"]), _turned(state["exp_avg"], state["Q"])
        state["exp_avg_sq"].lerp_(turned.square(), 1 - beta2)
        update = mean / (state["exp_avg_sq"].sqrt() + group["eps"])
        rate = group["lr"] / (1 - beta ** group["counted"])
        p.add_(_turned(update, [basis.T for basis in state["Q"]]), alpha=-rate)


def _turned(value: Tensor, bases: list[Tensor]) -> Tensor:
    if value.ndim == 1:
        return bases[0].T @ value
    return bases[0].T @ value @ bases[1]
