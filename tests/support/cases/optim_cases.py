"""Optimizers of zerofx.optim beside what they must equal: torch's own, or a plain reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerofx


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, a tensor at a time."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.sub_(lr * (update + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


class PlainLamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, a tensor at a time, with bounds on the trust ratio."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group, **self.state[p])

    def _step(
        self, p: Tensor, group: Any, step: int = 0, m: Tensor | None = None, v: Tensor | None = None
    ) -> None:
        beta1, beta2 = group["betas"]
        step += 1
        m = (1 - beta1) * p.grad + (0 if m is None else beta1 * m)
        v = (1 - beta2) * p.grad**2 + (0 if v is None else beta2 * v)
        self.state[p] = {"step": step, "m": m, "v": v}
        if group["bias_correction"]:
            m, v = m / (1 - beta1**step), v / (1 - beta2**step)
        u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
        of_p, of_u, ratio = p.double().norm(), u.double().norm(), 1.0
        if of_p > 0 and of_u > 0:
            ratio = float((of_p / of_u).clamp(group["min_coeff"], group["max_coeff"]))
        p.sub_(group["lr"] * ratio * u)


LAMB = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
BERT = {"bias_correction": False, "max_coeff": 0.5, "min_coeff": 0.08}
PAPER = {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}
LION = {"lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.1}

# name -> (class here, what it must equal, options of both)
OPTIMIZERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "adamw": ("AdamW", torch.optim.AdamW, {"lr": 0.01}),
    "adam": ("Adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": ("AdamW", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "sgd": ("SGD", torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.01}),
    "momentum": ("SGD", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": ("SGD", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "lion": ("Lion", PlainLion, LION),
    "lamb": ("Lamb", PlainLamb, {**LAMB, **PAPER}),
    "lamb-bert": ("Lamb", PlainLamb, {**LAMB, **BERT}),
}


def ours(name: str, params: Any, **more: Any) -> Any:
    """Return the optimizer of zerofx.optim over `params`."""
    kind, _, options = OPTIMIZERS[name]
    return getattr(zerofx.optim, kind)(params, **{**options, **more})


def theirs(name: str, params: Any, **more: Any) -> Any:
    """Return what it must equal."""
    _, kind, options = OPTIMIZERS[name]
    return kind(params, **{**options, **more})


def mixed_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups that interleave within every bucket, with options of their own."""
    params = list(model.parameters())
    return [
        {"params": params[0::3]},
        {"params": params[1::3], "lr": 0.004},
        {"params": params[2::3], "weight_decay": 0.0},
    ]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return ||a - b|| / ||b|| over all tensors."""
    gap = sum(float((found[k] - v).double().norm()) ** 2 for k, v in expected.items())
    return (gap / sum(float(v.double().norm()) ** 2 for v in expected.values())) ** 0.5


class Mixed(nn.Module):
    """Tensors of many sizes, some of a single element, one frozen, one used on odd calls only.

    No true gradient is zero, so that every update is well determined.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 40)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.side = nn.Linear(40, 3)
        self.last = nn.Linear(40, 3)
        self.shift = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor, y: Tensor, aside: bool) -> Tensor:
        h = torch.tanh(self.frozen(torch.tanh(self.first(x))) * self.scale)
        out = self.last(h) + (self.side(h) if aside else 0.0) + self.shift
        return (out - y).square().mean()


def mixed_model() -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Mixed()


def mixed_batch(step: int, rank: int) -> tuple[Tensor, Tensor, bool]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 12, generator=generator)
    return x, torch.randn(6, 3, generator=generator), step % 3 != 1


def reference(
    make: Callable[[nn.Module], Any], world: int, steps: int, clip: float | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in one process on the mean of the ranks' gradients; return parameters and norms."""
    model, norms = mixed_model(), []
    optimizer = make(model)
    for step in range(steps):
        for rank in range(world):
            (model(*mixed_batch(step, rank)) / world).backward()
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}, norms
