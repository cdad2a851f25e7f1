"""One rank of a trial: it trains the compiled model; rank 0 also trains plainly and compares.

torchrun ... -m zerofx.tools.trial.ranks SETTINGS.json REPORT.json
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from zerofx import optim
from zerofx.compat.graphs import pytree
from zerofx.errors import PlanError, TargetError, ZerofxError
from zerofx.ir.meta import info
from zerofx.plan.plan import Plan
from zerofx.tools.targets import Target, resolve
from zerofx.tools.trial.settings import TOLERANCES, Difference, Settings, Trial

# -- Tensors of two trainings, compared in the order in which a training makes them ----------------


SMALL = 1e-6  # of the largest norm of a kind: a tensor below that is compared with that


class Comparison:
    """Notes the differences of tensors from those of plain training."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.compared: dict[str, int] = {}
        self.largest: dict[str, Difference] = {}
        self.first: Difference | None = None

    def add(self, kind: str, step: int, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Compare tensors of one kind: name -> (this one's, plain training's)."""
        norms = {name: _norm(expected) for name, (_, expected) in pairs.items()}
        least = SMALL * max(norms.values(), default=0.0)
        for name, (got, expected) in pairs.items():
            found = _difference(kind, name, step, got, expected, max(norms[name], least))
            self.compared[kind] = self.compared.get(kind, 0) + 1
            worst = self.largest.get(kind)
            if worst is None or not found.error <= worst.error:
                self.largest[kind] = found
            if self.first is None and not found.error <= self.tolerance:
                self.first = found


def _norm(tensor: Tensor) -> float:
    """Return the norm of the finite elements of a tensor."""
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).norm())


def _difference(
    kind: str, name: str, step: int, got: Tensor, expected: Tensor, norm: float
) -> Difference:
    """Return the difference of `got`; elements that are NaN or infinite on both sides are equal."""
    a, b = got.detach().double().cpu(), expected.detach().double().cpu()
    if a.shape != b.shape:
        return Difference(kind, f"{name} {list(a.shape)}", step, math.inf)
    if not a.numel():
        return Difference(kind, name, step, 0.0)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs().nan_to_num(math.inf, math.inf))
    size = float(gap.norm())
    error = size / norm if norm else (0.0 if not size else math.inf)
    index = int(gap.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), a.shape))
    return Difference(
        kind, name, step, error, at, float(a.flatten()[index]), float(b.flatten()[index])
    )


# -- Batches of a trial: variations of a model's example call, another for each rank and step ------
# If all ranks had the same batch, the mean of their gradients would be the gradient of each, and a
# missing exchange would go unnoticed.


NOISE = 0.1  # of a floating-point tensor's standard deviation

Call = tuple[tuple[Any, ...], dict[str, Any]]


def vary(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Call:
    """Return the call of that number, the same on every rank.

    Integers (tokens, labels, positions) are permuted within their tensor, so that they stay in
    range. Floating-point tensors get noise. Everything else is unchanged.
    """
    generator = torch.Generator().manual_seed(number)
    varied: Call = pytree.tree_map(lambda leaf: _vary(leaf, generator), (args, kwargs))
    return varied


def _vary(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        spread = float(leaf.detach().float().std()) if leaf.numel() > 1 else 1.0
        noise = torch.randn(leaf.shape, generator=generator) * (spread or 1.0) * NOISE
        varied = leaf.detach() + noise.to(leaf.dtype)
        return varied.requires_grad_(leaf.requires_grad)
    if leaf.dtype is torch.bool or leaf.is_complex():
        return leaf
    order = torch.randperm(leaf.numel(), generator=generator)
    return leaf.flatten()[order].view(leaf.shape)


# -- Plain training in one process, whose gradients are the mean over the batches of all ranks -----


LR, MOMENTUM = 0.05, 0.9


def loss_of(result: Any) -> Tensor:
    """Return the loss of a result: the model's own, else the mean square of its outputs.

    Raises:
        TargetError: no output is a floating-point tensor that depends on parameters.
    """
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise TargetError(
            "verify --run: the model returns no tensor with gradients. Return a loss or outputs "
            "that depend on parameters."
        )
    scalars = [x for x in leaves if x.dim() == 0]
    return scalars[0] if scalars else torch.stack([x.square().mean() for x in leaves]).sum()


class Plain:
    """The model as the user wrote it, on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)

    def accumulate(self, calls: list[Call], seeds: list[int]) -> list[float]:
        """Run forward and backward of one batch per rank; return the losses.

        All ranks start with the same buffers, and those of rank 0 are kept, as in a compiled model.
        """
        losses, buffers = [], dict(self.model.named_buffers())
        before = {name: b.clone() for name, b in buffers.items()}
        after = before
        for rank, ((args, kwargs), seed) in enumerate(zip(calls, seeds, strict=True)):
            if rank:
                self._set(before)
            torch.manual_seed(seed)
            loss = loss_of(self.model(*args, **kwargs))
            (loss / len(calls)).backward()
            losses.append(float(loss.detach()))
            if not rank:
                after = {name: b.clone() for name, b in self.model.named_buffers()}
        self._set(after)
        return losses

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])

    def step(self) -> None:
        """Update the parameters, and drop the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


# -- One rank of a trial --------------------------------------------------------------------------


SEED = 0


def main(argv: list[str]) -> int:
    """Run the trial of a settings file; rank 0 writes the report, or a user's error."""
    settings, report = Settings.read(Path(argv[0])), Path(argv[1])
    rank = int(os.environ.get("RANK", 0))
    try:
        found = run(settings)
    except ZerofxError as error:
        if rank == 0:
            report.write_text(json.dumps({"error": str(error)}), encoding="utf-8")
        raise
    if rank == 0:
        report.write_text(json.dumps(found.to_dict()), encoding="utf-8")
    return 0


def run(settings: Settings) -> Trial:
    """Train on this rank, and compare on rank 0.

    Raises:
        PlanError: the plan trains with other gradients than plain training.
        TargetError: the model has no weights, or no loss.
    """
    plan = Plan.from_dict(settings.plan)
    if plan.offload.delayed:
        raise PlanError(
            "verify --run: offload.delayed updates with gradients that are one step old, unlike "
            "plain training. Leave it out."
        )
    torch.manual_seed(SEED)
    target = resolve(settings.model, settings.batch, settings.seq, device="cpu")
    _check_real(target)
    formats = plan.precision.compute, *(plan.precision.modules or {}).values()
    tolerance = settings.tolerance or max(TOLERANCES.get(name, 1e-4) for name in formats)
    return _Rank(settings, plan, target, Comparison(tolerance)).train()


def reference(target: Target) -> nn.Module:
    """Return another model with the same weights, which shares nothing with the target's.

    It is built again: a copy would share the modules that functions of the model refer to. A
    function that returns the same model each time, or one of another structure, gets a copy.
    """
    if target.again is not None:
        torch.manual_seed(SEED)  # as before the first, for what is drawn beside weights
        made = target.again().module
        if _takes_weights(made, target.module):
            return made
    return copy.deepcopy(target.module)


def _takes_weights(made: nn.Module, model: nn.Module) -> bool:
    """Copy all weights into a model built again; tell whether it can be and is equal."""
    shared = {id(each) for each in made.modules()} & {id(each) for each in model.modules()}
    own, wanted = _weights(made), _weights(model)
    if shared or own.keys() != wanted.keys():
        return False
    pairs = [(tensor, wanted[name]) for name, tensor in own.items()]
    if {id(a) for a, _ in pairs} & {id(b) for _, b in pairs}:
        return False
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return False
    for tensor, value in pairs:
        if not _is_equal(tensor, value):
            tensor.detach().copy_(value.detach())
        tensor.requires_grad_(value.requires_grad)
    made.train(model.training)
    return all(_is_equal(a, b) for a, b in pairs)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, those with several names once, and buffers."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())  # a NaN equals a NaN


def _check_real(target: Target) -> None:
    tensors = [*target.module.parameters(), *target.module.buffers()]
    if any(t.is_meta for t in tensors):
        raise TargetError(
            f"verify --run: {target.name} is on the meta device, without weights to train. Return "
            "it on the CPU, or give the function an argument `device` and use it."
        )


class _Rank:
    """The trainings of one rank; `plain` exists on rank 0 only."""

    def __init__(
        self, settings: Settings, plan: Plan, target: Target, comparison: Comparison
    ) -> None:
        self.settings, self.target, self.comparison = settings, target, comparison
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.plain = Plain(reference(target)) if self.rank == 0 else None
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
            self._average_ignored()
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
            found.largest, found.first, [str(island) for island in self.model.zerofx.islands],
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

    def _average_ignored(self) -> None:
        """Average the gradients that the plan leaves to the user, as a user would."""
        owned = self.model.zerofx.layout.owned
        for name, param in self.model.named_parameters():
            if self.world > 1 and name not in owned and param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= self.world

    def _check_draws(self) -> None:
        """Refuse models with random numbers on several ranks, which plain training cannot repeat.

        Raises:
            TargetError: the model draws random numbers, and there are several ranks.
        """
        graphs = [gm.graph for program in self.model.programs for gm in program.graphs.values()]
        if self.world > 1 and any(info(n).is_random for graph in graphs for n in graph.nodes):
            raise TargetError(
                f"verify --run: {self.target.name} draws random numbers. Each of {self.world} "
                "ranks has a stream of its own. Set dropout to 0, let build pass what forward "
                "draws (noise, time steps) as arguments, or give --world 1."
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
        """Compare tensors, gathered on all ranks one after another."""
        got = {name: _whole(tensor) for name, tensor in mine}
        if self.plain is None:
            return
        expected = dict(of_plain(self.plain))
        pairs = {}
        for name in dict.fromkeys([*got, *expected]):  # a missing gradient counts as zero
            some = got.get(name, expected.get(name))
            assert some is not None
            zero = torch.zeros_like(some)
            pairs[name] = got.get(name, zero), expected.get(name, zero)
        self.comparison.add(kind, step, pairs)


def _gradients(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return gradients in the order in which backward makes them, as far as it is known."""
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
