"""One rank of a trial: trains the compiled model; rank 0 trains plainly beside it and compares.

torchrun ... -m zerofx.tools.trial.ranks SETTINGS.json REPORT.json
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerofx
from zerofx import optim
from zerofx.compat.graphs import pytree
from zerofx.errors import PlanError, TargetError, ZerofxError
from zerofx.ir.meta import info
from zerofx.plan.plan import Plan
from zerofx.tools.targets import Target, resolve
from zerofx.tools.trial.batches import Call, vary
from zerofx.tools.trial.compare import Comparison
from zerofx.tools.trial.plain import LR, MOMENTUM, Plain, loss_of
from zerofx.tools.trial.settings import TOLERANCES, Settings, Trial

SEED = 0


def main(argv: list[str]) -> int:
    """Run the trial of a settings file; rank 0 writes what it found, or a user's error."""
    settings, report = Settings.read(Path(argv[0])), Path(argv[1])
    rank = int(os.environ.get("RANK", 0))
    try:
        found = run(settings)
    except ZerofxError as error:
        if rank == 0:
            text = f"{type(error).__name__}: {error}"
            report.write_text(json.dumps({"error": text}), encoding="utf-8")
        raise
    if rank == 0:
        report.write_text(json.dumps(found.to_dict()), encoding="utf-8")
    return 0


def run(settings: Settings) -> Trial:
    """Train on this rank, and compare on rank 0.

    Raises:
        PlanError: the plan trains something else than plain training does.
        TargetError: the model has no weights, or nothing to train on.
    """
    plan = Plan.from_dict(settings.plan)
    if plan.offload.delayed:
        raise PlanError(
            "verify --run: offload.delayed updates with gradients that are one step old, which "
            "plain training does not; leave it out here"
        )
    torch.manual_seed(SEED)
    target = resolve(settings.model, settings.batch, settings.seq, device="cpu")
    _check_real(target)
    tolerance = settings.tolerance or TOLERANCES.get(str(plan.precision.compute), 1e-4)
    return _Rank(settings, plan, target, Comparison(tolerance)).train()


def _check_real(target: Target) -> None:
    tensors = [*target.module.parameters(), *target.module.buffers()]
    if any(t.is_meta for t in tensors):
        raise TargetError(
            f"verify --run: {target.name} is on the meta device, and nothing can be trained "
            "without weights; return it on the CPU, or take an argument `device` and heed it"
        )


class _Rank:
    """The trainings of one rank; `plain` is there on rank 0."""

    def __init__(
        self, settings: Settings, plan: Plan, target: Target, comparison: Comparison
    ) -> None:
        self.settings, self.target, self.comparison = settings, target, comparison
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.plain = Plain(copy.deepcopy(target.module)) if self.rank == 0 else None
        local = int(os.environ.get("LOCAL_RANK", 0))
        has_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = f"cuda:{local}" if has_gpus else "cpu"
        self.model = zerofx.compile(target.module, plan, device=self.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optim.SGD(trained, lr=LR, momentum=MOMENTUM)
        self.updates_at_once = plan.update == "in-backward"

    def train(self) -> Trial:
        """Train all steps; compare after each backward and each update."""
        for step in range(self.settings.steps):
            self._accumulate(step)
            if not self.updates_at_once:
                mine = _gradients(self.model)
                self._compare("gradient", step, mine, lambda p: _gradients(p.model))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.plain is not None:
                self.plain.step()
            mine = _parameters(self.model)
            self._compare("parameter", step, mine, lambda p: _parameters(p.model))
            mine = self.model.named_buffers()
            self._compare("buffer", step, mine, lambda p: p.model.named_buffers())
        found = self.comparison
        return Trial(
            self.world, self.settings.steps, self.device, found.tolerance, found.compared,
            found.largest, found.first,
        )  # fmt: skip

    def _accumulate(self, step: int) -> None:
        """Run the forwards and backwards of a step, and compare their losses."""
        for micro in range(self.settings.accumulation):
            number = (step * self.settings.accumulation + micro) * self.world
            args, kwargs = self._call(number + self.rank)
            torch.manual_seed(number + self.rank)
            is_last = micro == self.settings.accumulation - 1
            unsynced = self.settings.no_sync and not is_last
            with self.model.no_sync() if unsynced else nullcontext():
                loss = loss_of(self.model(*_on(self.device, args), **_on(self.device, kwargs)))
                loss.backward()
            self._check_draws()
            losses = self._gather(float(loss.detach()))
            if self.plain is None:
                continue
            numbers = range(number, number + self.world)
            expected = self.plain.accumulate([self._call(n) for n in numbers], list(numbers))
            self.comparison.add("loss", step, {
                f"of micro-batch {micro} on rank {rank}": (torch.tensor(got), torch.tensor(want))
                for rank, (got, want) in enumerate(zip(losses, expected, strict=True))
            })  # fmt: skip

    def _check_draws(self) -> None:
        """Refuse what draws numbers of each rank's own, which plain training cannot draw again.

        Raises:
            TargetError: it does, on several ranks.
        """
        graphs = [gm.graph for program in self.model.programs for gm in program.graphs.values()]
        if self.world > 1 and any(info(n).is_random for graph in graphs for n in graph.nodes):
            raise TargetError(
                f"verify --run: {self.target.name} draws random numbers, and each of {self.world} "
                "ranks has a stream of its own; set dropout to 0, or try --world 1"
            )

    def _call(self, number: int) -> Call:
        args, kwargs = self.target.args, self.target.kwargs
        return (args, kwargs) if self.settings.same_batch else vary(args, kwargs, number)

    def _gather(self, loss: float) -> list[float]:
        if self.world == 1:
            return [loss]
        losses: list[Any] = [None] * self.world
        dist.all_gather_object(losses, loss)
        return losses

    def _compare(
        self,
        kind: str,
        step: int,
        mine: Iterator[tuple[str, Tensor]],
        of_plain: Callable[[Plain], Iterator[tuple[str, Tensor]]],
    ) -> None:
        """Compare tensors, made whole on all ranks one after another."""
        got = {name: _whole(tensor) for name, tensor in mine}
        if self.plain is None:
            return
        expected = dict(of_plain(self.plain))
        pairs = {}
        for name in dict.fromkeys([*got, *expected]):  # a gradient that is missing is none: zero
            some = got.get(name, expected.get(name))
            assert some is not None
            zero = torch.zeros_like(some)
            pairs[name] = got.get(name, zero), expected.get(name, zero)
        self.comparison.add(kind, step, pairs)


def _gradients(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return gradients in the order in which backward makes them, as far as that is known."""
    pairs = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return iter(pairs[::-1])


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p.detach()) for name, p in model.named_parameters())


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().cpu().clone()


def _on(device: str, values: Any) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
