"""The differential job: train on the ranks of a world, and beside it in one process.

The reference is one process that runs each rank's micro-batches in turn and averages the
gradients (docs/testing.md, Numerics).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from models import CASES, Case
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import zerofx

FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


@dataclass
class Report:
    """How far the ranks' training lies from one process's, relative."""

    loss: float = 0.0
    model: float = 0.0
    tensors: dict[str, float] = field(default_factory=dict)
    buffers: float = 0.0
    vanishing: list[str] = field(default_factory=list)  # true gradient zero: only listed
    final_loss: float = 0.0


def loss_of(result: Any) -> Tensor:
    """Return the loss in a model's result."""
    if isinstance(result, Mapping):
        return result["loss"]
    if hasattr(result, "loss"):
        return result.loss
    return result if isinstance(result, Tensor) else sum(r.float().pow(2).mean() for r in result)


@dataclass(frozen=True)
class Choice:
    """What the loop does, whatever the plan."""

    optimizer: str = "sgd"
    accumulation: int = 1
    clip: float | None = None
    steps: int = 5


@dataclass
class Run:
    """The reference's training: losses by (step, micro-batch, rank), and what came of it.

    largest: of each parameter, by element, the largest gradient of any step.
    """

    model: nn.Module
    losses: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)


def train_cell(case_name: str, plan: dict[str, Any], options: dict[str, Any]) -> Report:
    """Run `train` with its options in one dict, as the pool passes arguments."""
    return train(case_name, plan, **options)


def train(case_name: str, plan: dict[str, Any], *options: Any, **named: Any) -> Report:
    """Run on every rank, with a `Choice`'s fields; return the comparison with the reference.

    machine: the description to compile for, instead of this one's.
    """
    model = zerofx.compile(CASES[case_name].make(), plan, machine=named.pop("machine", None))
    return _follow(case_name, model, plan, Choice(*options, **named))


def _follow(
    case_name: str, model: zerofx.CompiledModule, plan: dict[str, Any], choice: Choice
) -> Report:
    case = CASES[case_name]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    expected = _reference(case_name, world, plan.get("precision", "fp32"), choice)
    optimizer = OPTIMIZERS[choice.optimizer](list(model.parameters()))
    report = Report()
    for step in range(choice.steps):
        for micro in range(choice.accumulation):
            args, kwargs = case.batch(_seed(step, micro, rank))
            loss = loss_of(model(*args, **kwargs))
            (loss / choice.accumulation).backward()
            wanted = expected.losses[step, micro, rank]
            report.loss = max(report.loss, _relative(loss, wanted))
        _step(model, optimizer, choice)
    report.final_loss = float(loss.detach())
    _compare(report, expected.model, model, expected.largest)
    return report


def _seed(step: int, micro: int, rank: int) -> int:
    return 1000 * step + 10 * micro + rank


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, choice: Choice) -> None:
    if choice.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), choice.clip)
    optimizer.step()
    optimizer.zero_grad()


@lru_cache(maxsize=8)
def _reference(case_name: str, world: int, precision: str, choice: Choice) -> Run:
    """Train in one process, each rank's micro-batches in turn."""
    case, dtype = CASES[case_name], FORMATS[precision]
    run = Run(case.make())
    optimizer = OPTIMIZERS[choice.optimizer](list(run.model.parameters()))
    for step in range(choice.steps):
        for micro in range(choice.accumulation):
            seeds = [_seed(step, micro, r) for r in range(world)]
            losses = _reference_micro(run.model, case, seeds, choice.accumulation, dtype)
            run.losses |= {(step, micro, r): loss for r, loss in enumerate(losses)}
        for name, param in run.model.named_parameters():
            if param.grad is not None:
                seen = run.largest.get(name, torch.zeros(()))
                run.largest[name] = torch.maximum(seen, param.grad.abs())
        _step(run.model, optimizer, choice)
    return run


def _reference_micro(
    model: nn.Module, case: Case, seeds: list[int], accumulation: int, dtype: torch.dtype | None
) -> list[Tensor]:
    losses = []
    for r, seed in enumerate(seeds):
        before = {n: b.clone() for n, b in model.named_buffers()}
        args, kwargs = case.batch(seed)
        result = model(*args, **kwargs) if dtype is None else _call_in(dtype, model, args, kwargs)
        loss = loss_of(result)
        (loss / (len(seeds) * accumulation)).backward()
        losses.append(loss.detach())
        if r > 0:  # running statistics follow rank 0
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
    return losses


def _call_in(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a model of fp32 parameters in another format; batch norms keep theirs in fp32."""
    kept = {
        f"{prefix}.{key}"
        for prefix, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None
        for key in module._parameters
    }
    params = {n: p if n in kept else p.to(dtype) for n, p in model.named_parameters()}
    args, kwargs = tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v,
        (args, kwargs),
    )
    return functional_call(model, params, args, kwargs)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp_min(1e-30))


def _compare(
    report: Report, reference: nn.Module, model: nn.Module, largest: Mapping[str, Tensor]
) -> None:
    """Compare parameters, leaving out (and listing) elements whose true gradient is zero.

    A key's bias moves no attention score relative to another, so its gradient is rounding alone,
    and AdamW makes full steps of rounding.
    """
    state = model.state_dict()
    total = sum(float(g.norm()) ** 2 for g in largest.values()) ** 0.5
    difference = square = 0.0
    for name, param in reference.named_parameters():
        real = torch.ones_like(param, dtype=torch.bool)
        if name in largest:
            real = largest[name] >= 1e-7 * total
        if not real.all():
            report.vanishing.append(f"{name}: {int((~real).sum())} elements")
        gap = float((state[name] - param.detach())[real].norm())
        size = float(param.detach()[real].norm())
        difference, square = difference + gap * gap, square + size * size
        report.tensors[name] = gap / max(size, 1e-30)
    report.model = (difference / max(square, 1e-30)) ** 0.5
    for name, buffer in reference.named_buffers():
        if name in state:
            report.buffers = max(report.buffers, _relative(state[name].float(), buffer.float()))
