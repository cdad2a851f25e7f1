"""One model trained plainly and compiled: do both produce the same numbers?

It trains two steps with SGD from equal weights on equal batches. The losses, the results of the
calls, every gradient of both steps (including those of inputs), and every parameter and buffer
afterwards are compared. On several ranks, each has its own batches, and plain training takes the
mean of their gradients.

A tensor is equal if it is within 2e-6 of plain training's, as a relative norm, or if it is a
gradient below 1e-7 of the model's in both, since its true value is zero. A tensor with a larger
difference counts as "rounding" in three cases: it is within 1e-5 of training in double precision;
it is about as far from double precision as plain training; or it is about as far from plain
training as plain training is from itself after all weights change by their last bit. Everything
else is "different".
"""

from __future__ import annotations

import copy
import logging
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.compat.graphs import pytree

STEPS, RATE = 2, 0.02
TOLERANCE, VANISHING = 2e-6, 1e-7
AS_FAR, NEAR = 4.0, 1e-5  # times plain training's own distance from double precision; relative
LAST_BIT = 1.2e-7  # of single precision, relative
Outcome = dict[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of one call


class Case(Protocol):
    """A small model with random weights, and the calls that train it."""

    @property
    def group(self) -> str: ...

    @property
    def model(self) -> str: ...

    def make(self) -> nn.Module: ...

    def batch(self, seed: int) -> Call: ...


@dataclass
class Run:
    """The results of a training, in order, by name."""

    rate: float = 0.0
    norm: float = 0.0  # the largest norm of a step's whole gradient
    made: dict[str, Tensor] = field(default_factory=dict)
    first_s: float = 0.0


def loss_of(result: Any) -> Tensor:
    """Return a model's loss, or the mean square of all its results if it has none."""
    if getattr(result, "loss", None) is not None:
        return result.loss  # type: ignore[no-any-return]
    values = [v for v in _leaves(result) if v.requires_grad]
    return torch.stack([v.abs().pow(2).mean() for v in values]).sum()


def _leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def train(model: nn.Module, steps: list[list[Call]], rate: float = 0.0) -> Run:
    """Train on each step's calls once, one per rank that this process simulates.

    Results and buffer updates of the first rank count; gradients are the mean of all.

    rate: the learning rate; if 0, it is chosen from the first gradient.
    """
    run = Run(rate)
    for step, calls in enumerate(steps):
        began = time.perf_counter()
        buffers = [b.detach().clone() for b in model.buffers()]
        for number, (args, kwargs) in reversed(list(enumerate(calls))):
            _restore(model, buffers)
            torch.manual_seed(step)
            result = model(*args, **kwargs)
            loss = loss_of(result)
            loss.backward()
            if number == 0:
                run.made[f"loss of step {step}"] = loss.detach().clone()
                _note(run, step, result, (args, kwargs))
        if not step:
            run.first_s = time.perf_counter() - began
        with torch.no_grad():
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            grads = {name: whole(grad) / len(calls) for name, grad in grads.items()}
            norm = sum(float(g.double().norm()) ** 2 for g in grads.values()) ** 0.5
            run.norm, run.rate = max(run.norm, norm), run.rate or RATE / max(1.0, norm)
            for name, grad in grads.items():
                run.made[f"gradient of {name} at step {step}"] = grad
        if grads:
            rate = run.rate / len(calls)
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate).step()
        model.zero_grad()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            run.made[name] = whole(value)
    return run


def _restore(model: nn.Module, buffers: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=False):
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _note(run: Run, step: int, result: Any, call: Call) -> None:
    """Keep the results of a call, and the gradients of its arguments."""
    for number, value in enumerate(_leaves(result)):
        run.made[f"output {number} of step {step}"] = value.detach().clone()
    for number, value in enumerate(_leaves(call)):
        if value.requires_grad and value.grad is not None:
            run.made[f"gradient of argument {number} at step {step}"] = value.grad.clone()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def in_double(model: nn.Module, steps: list[list[Call]], rate: float) -> Run:
    """Train in double precision, except where the model itself chooses single precision."""
    wide = pytree.tree_map(_widened, steps)
    return train(model.double(), wide, rate)


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _own(calls: Any) -> Any:
    """Return a copy that shares nothing with `calls`, to which backward writes gradients."""
    return pytree.tree_map(
        lambda v: (
            v.detach().clone().requires_grad_(v.requires_grad)
            if isinstance(v, Tensor)
            else copy.deepcopy(v)
        ),
        calls,
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference; infinite if only one has a value that is not finite."""
    a, b = a.double().nan_to_num(7e77), b.double().nan_to_num(7e77)
    return float((a - b).norm())


def compare(wanted: Run, found: Run) -> tuple[dict[str, float], list[str]]:
    """Return relative distances above the tolerance, by name, and results of only one run."""
    far = {}
    for name in wanted.made.keys() & found.made.keys():
        size = float(wanted.made[name].double().nan_to_num(7e77).norm())
        off = distance(wanted.made[name], found.made[name])
        vanishes = name.startswith("gradient") and max(size, off) <= VANISHING * wanted.norm
        if off > TOLERANCE * size and not vanishes:
            far[name] = off / max(size, 1e-30)
    return far, sorted(wanted.made.keys() ^ found.made.keys())


def is_rounding(name: str, wanted: Run, found: Run, exact: Run) -> bool:
    """Return whether plain training is about as far from double precision as the result."""
    truth = exact.made[name]
    allowed = AS_FAR * distance(wanted.made[name], truth) + NEAR * float(truth.norm())
    return distance(found.made[name], truth) <= allowed


def moved_a_bit(model: nn.Module) -> nn.Module:
    """Change all weights by their last bit, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + LAST_BIT * sign)
    return model


def is_unsteady(name: str, wanted: Run, found: Run, moved: Run) -> bool:
    """Return whether plain training is about as far from itself with weights moved by a bit."""
    if name not in moved.made or moved.made[name].shape != found.made[name].shape:
        return False
    allowed = AS_FAR * distance(wanted.made[name], moved.made[name])
    return distance(found.made[name], wanted.made[name]) <= allowed


class Warnings(logging.Handler):
    """Collects zerofx's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def examine(case: Case, kernels: str, rank: int = 0, world_size: int = 1) -> Outcome:
    """Train one model plainly and compiled, and report how they compare.

    On several ranks, the process group exists, and rank 0's result counts.
    """
    from zerofx.errors import ZerofxError

    torch.set_num_threads(1)
    steps = [
        [case.batch(step * world_size + r) for r in range(world_size)] for step in range(STEPS)
    ]
    rate = torch.zeros(1, dtype=torch.float64)
    try:
        plain = case.make()
        start = [p.detach().clone() for p in plain.parameters()]
        if rank == 0:
            wanted = train(plain, _own(steps))
            rate.fill_(wanted.rate)
    except Exception:
        return {"verdict": "no plain run", "detail": traceback.format_exc()}
    if world_size > 1:
        dist.broadcast(rate, 0)
    began = time.perf_counter()
    warnings = Warnings()
    logging.getLogger("zerofx").addHandler(warnings)
    try:
        found, outcome = _compiled(
            _made(case, start), _own([[calls[rank]] for calls in steps]), kernels, rate
        )
    except ZerofxError as error:
        return {"verdict": "refused", "detail": f"{type(error).__name__}: {error}",
                "first_s": time.perf_counter() - began}  # fmt: skip
    except Exception:
        return {"verdict": "crash", "detail": traceback.format_exc()}
    finally:
        logging.getLogger("zerofx").removeHandler(warnings)
    outcome["warnings"] = warnings.said
    if rank:
        return outcome
    far, alone = compare(wanted, found)
    if not far and not alone:
        return outcome | {"verdict": "equal"}
    if alone:
        return outcome | {"verdict": "different", "detail": f"only one has {alone[:5]}"}
    wrong = dict(far)
    try:
        exact = in_double(_made(case, start), steps, wanted.rate)
        wrong = {n: v for n, v in far.items() if not is_rounding(n, wanted, found, exact)}
    except Exception as error:  # the model has fixed dtypes in its code
        outcome["double"] = f"{type(error).__name__}: {error}"
    if wrong:
        moved = train(moved_a_bit(_made(case, start)), _own(steps), wanted.rate)
        wrong = {n: v for n, v in wrong.items() if not is_unsteady(n, wanted, found, moved)}
    worst = max(wrong or far, key=far.__getitem__)
    detail = f"{len(wrong or far)} tensors up to {far[worst]:.1e} ({worst})"
    largest = sorted(wrong or far, key=far.__getitem__)[-8:]
    outcome["far"] = {name: far[name] for name in largest}
    return outcome | {"verdict": "different" if wrong else "rounding", "detail": detail}


def _made(case: Case, start: list[Tensor]) -> nn.Module:
    """Create the model again with these parameters: some are uninitialised memory."""
    model = case.make()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    return model


def _compiled(
    model: nn.Module, steps: list[list[Call]], kernels: str, rate: Tensor
) -> tuple[Run, Outcome]:
    import zerofx
    from zerofx.runtime.regions.cache import CompileCount

    before = CompileCount.compiled
    model = zerofx.compile(model, zerofx.Plan(stage=3, kernels=kernels))
    found = train(model, steps, float(rate))
    islands = model.zerofx.islands
    return found, {
        "first_s": found.first_s, "compiled": CompileCount.compiled - before,
        "programs": len(model.zerofx.programs), "islands": len(islands),
        "inside": sum(island.share for island in islands),
    }  # fmt: skip


def plainly(case: Case) -> Outcome:
    """Train a model only plainly."""
    torch.set_num_threads(1)
    try:
        model = case.make()
        began = time.perf_counter()
        run = train(model, [[case.batch(step)] for step in range(STEPS)])
    except Exception:
        return {"verdict": "no plain run", "detail": traceback.format_exc()}
    size = sum(p.numel() for p in model.parameters())
    said = f"{size} parameters, {time.perf_counter() - began:.1f} s, loss {_losses(run)}"
    return {"verdict": "equal", "detail": said}


def _losses(run: Run) -> list[float]:
    return [float(v) for name, v in run.made.items() if name.startswith("loss")]
