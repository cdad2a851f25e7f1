"""Training loops that a plan with shards on the host must run as the same plan without does."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from models import CASES
from offload_cases import SMALL, batch_loss, gradients
from torch import Tensor

import zerofx

STEPS = 3
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "flat": lambda p: zerofx.optim.AdamW(p, lr=1e-2),
    # With this eps, gradients that are 0 but for rounding (of keys' biases) move nothing.
    "clipped": lambda p: zerofx.optim.AdamW(p, lr=1e-2, eps=1e-4, max_grad_norm=0.05),
    "lamb": lambda p: zerofx.optim.Lamb(p, lr=1e-2),
    "lion": lambda p: zerofx.optim.Lion(p, lr=1e-3),
    "flat-momentum": lambda p: zerofx.optim.SGD(p, lr=0.05, momentum=0.9),
}


@dataclass
class Run:
    """One training of a model: what it does, and what it leaves, in order."""

    case: str
    plan: Mapping[str, Any]
    optimizer: str
    known: dict[Any, Any]  # programs, from an earlier run of the plan
    found: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = zerofx.compile(
            CASES[self.case].make(), {"kernels": "aten", **self.plan}, machine=SMALL
        )
        self.model._programs.known.update(self.known)
        poisoned(self.model)
        self.steps = OPTIMIZERS[self.optimizer](self.model.parameters())

    def backward(self, step: int, share: int = 1) -> None:
        loss = batch_loss(self.model, self.case, step)
        (loss / share).backward()
        self.found.append(loss.detach())

    def step(self, *, to_none: bool = True) -> None:
        if self.plan.get("update") != "in-backward":
            self.found += gradients(self.model)
        self.steps.step()
        self.steps.zero_grad(set_to_none=to_none)

    def end(self) -> list[Tensor]:
        """Return all that the training leaves; a collective call."""
        for model in (self.model,):
            self.found += model.state_dict().values()
            for param in model.parameters():
                states = self.steps.state.get(param, {})
                self.found += [_local(v) for v in states.values() if isinstance(v, Tensor)]
        return self.found


def poisoned(model: Any) -> None:
    """Let what is released, and what has left, be NaN."""
    model._engine.slots.poison = model._engine.host.poison = True


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if hasattr(value, "to_local") else value).clone()


def is_exact(is_clipped: bool) -> bool:
    """Return whether shards elsewhere leave the same bits.

    In one process the norm that zerofx.optim clips by is summed by parameter on the device, where
    gradients have no bucket, and by bucket elsewhere.
    """
    return not is_clipped or int(os.environ.get("WORLD_SIZE", "1")) > 1


def nearly_equal(found: Tensor, expected: Tensor) -> bool:
    """Return whether they are the same but for such a norm's rounding: 1e-5 of the largest."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


# -- the loops ----------------------------------------------------------------------------------
def plain(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.step()


def accumulated(run: Run, *, no_sync: bool = False, norm: float | None = None) -> None:
    """Two micro-batches a step. Under no_sync an offloaded optimizer reduces all the same."""
    may_put_off = "offload" in run.plan or run.plan["stage"] > 1
    for step in range(STEPS):
        with run.model.no_sync() if no_sync and may_put_off else contextlib.nullcontext():
            run.backward(2 * step, 2)
        run.backward(2 * step + 1, 2)
        if norm is not None:
            run.found.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), norm))
        run.step()


def zeroed_in_place(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.step(to_none=False)


def evaluated_between(run: Run) -> None:
    for step in range(STEPS):
        batch_loss(run.model, run.case, 40 + step)  # a forward without its backward
        run.backward(step)
        run.model.eval()
        with torch.no_grad():
            run.found.append(batch_loss(run.model, run.case, 50))
        run.model.train()
        run.step()


def two_live(run: Run) -> None:
    for step in range(STEPS):
        losses = [batch_loss(run.model, run.case, 2 * step + i) for i in range(2)]
        for loss in reversed(losses):
            loss.backward()
            run.found.append(loss.detach())
        run.step()


def inferred_first(run: Run) -> None:
    """What the first call makes and keeps must serve those that train."""
    with torch.inference_mode():
        run.found.append(batch_loss(run.model, run.case, 30).clone())
    plain(run)
    run.model.refresh()
    run.backward(STEPS)
    run.step()


def failing(run: Run, call: str) -> None:
    """An exception in the middle of a call; the step is done again."""
    plain(run)
    engine = run.model._engine
    real = getattr(engine, call)
    left = [1]

    def fails(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        return 1 / 0 if left[0] < 0 else real(*args, **named)

    setattr(engine, call, fails)
    with contextlib.suppress(ZeroDivisionError):
        batch_loss(run.model, run.case, 7).backward()
    setattr(engine, call, real)
    run.steps.zero_grad()
    run.backward(8)
    run.step()


def copied(run: Run) -> None:
    """A copy trains on beside the first, each on memory of its own."""
    run.backward(0)
    run.step()
    other = Run(run.case, run.plan, run.optimizer, run.known)
    other.model = copy.deepcopy(run.model)
    poisoned(other.model)
    other.steps = OPTIMIZERS[run.optimizer](other.model.parameters())
    for step in range(1, STEPS):
        for each in (run, other):
            each.backward(step)
            each.step()
        other.backward(step + 10)
        other.step()
    run.found += other.end()


def written(run: Run) -> None:
    """Weights that are read, written by hand and loaded between steps."""
    run.backward(0)
    run.step()
    kept = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.backward(1)
    run.step()
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.5)
    run.backward(2)
    run.step()
    run.model.load_state_dict(kept)
    run.backward(3)
    run.step()


LOOPS: dict[str, tuple[str, Callable[[Run], None]]] = {
    "plain": ("adamw", plain),
    "accumulated": ("momentum", partial(accumulated, norm=0.05)),
    "no-sync": ("clipped", partial(accumulated, no_sync=True)),
    "zeroed-in-place": ("fused", zeroed_in_place),
    "evaluated-between": ("flat", evaluated_between),
    "two-live": ("lion", two_live),
    "fails-in-forward": ("flat", partial(failing, call="unpack")),
    "fails-in-backward": ("adamw", partial(failing, call="offload_grad")),
    "copied": ("fused", copied),
    "written": ("lamb", written),
    "inferred-first": ("flat-momentum", inferred_first),
}
IN_BACKWARD = {
    name: ("flat", LOOPS[name][1])
    for name in ("plain", "evaluated-between", "fails-in-forward", "copied", "written")
}


def differing(case: str, plan: dict[str, Any], half: int | None = None) -> list[str]:
    """Return the loops that leave other bits than under the same plan without offload.

    half: 0 or 1 for every other loop only, from the first or from the second.
    """
    offloaded, base = plan, {k: v for k, v in plan.items() if k != "offload"}
    table = IN_BACKWARD if plan.get("update") == "in-backward" else LOOPS
    known: dict[bool, dict[Any, Any]] = {False: {}, True: {}}
    wrong = []
    for name in list(table)[half or 0 :: 1 if half is None else 2]:
        optimizer, loop = table[name]
        results = []
        for away, chosen in ((False, base), (True, offloaded)):
            run = Run(case, chosen, optimizer, known[away])
            loop(run)
            results.append(run.end())
            known[away] = run.model._programs.known
        host = run.model._engine.host
        assert any(b.is_away for b in run.model._engine.layout.buckets) and host.moved["h2d"].calls
        same = torch.equal if is_exact(optimizer == "clipped") else nearly_equal
        is_same = len(results[0]) == len(results[1]) and all(map(same, *results))
        if not is_same or any(v.isnan().any() for v in results[1]):
            wrong.append(f"{name}: {_where(*results)}")
    return wrong


def differing_rows(rows: list[tuple[str, dict[str, Any]]], halved: bool = False) -> list[str]:
    """As `differing`, of several cases and plans."""
    return [
        f"{case} {plan}: {what}"
        for number, (case, plan) in enumerate(rows)
        for what in differing(case, plan, number % 2 if halved else None)
    ]


def _where(first: list[Tensor], second: list[Tensor]) -> str:
    if len(first) != len(second):
        return f"{len(first)} results became {len(second)}"
    at = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if not torch.equal(a, b)]
    return f"results {at[:5]} of {len(first)} differ, rank {os.environ.get('RANK', '0')}"
