"""One call of a program: forward, what it saves, and the backward that autograd asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.errors import GradientError
from zerofx.runtime.engine import Engine


@dataclass(frozen=True)
class Contract:
    """What a program's emitted functions take and give, by leaf numbers.

    outputs: leaf numbers of the forward's outputs, in their order.
    differentiable: those that may receive a gradient; others raise when they do.
    names: output leaf -> its name, for errors.
    tangents: output leaf -> (shape, strides, dtype) of the gradient that backward takes.
    input_grads: input leaves whose gradients backward returns, in order.
    updates: (kind, name or leaf) of each updated buffer or input, in order.
    guarded: positions in `saved` that the user can write to (inputs, outputs).
    digest: readable "name=value" items that must be equal on all ranks before a call.
    """

    outputs: tuple[int, ...]
    differentiable: frozenset[int]
    names: dict[int, str]
    tangents: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    input_grads: tuple[int, ...]
    updates: tuple[tuple[str, str | int], ...]
    guarded: tuple[int, ...]
    is_training: bool
    is_random: bool
    label: str
    digest: str


@dataclass
class Call:
    """What crosses from one forward to its backward; no other call shares it."""

    leaves: list[Any]
    saved: list[Tensor] | None = None
    writes: int = 0
    versions: list[int] = field(default_factory=list)


class Executable:
    """A loaded program bound to a model's engine: call it with input leaves."""

    def __init__(
        self,
        forward: Callable,
        backward: Callable | None,
        contract: Contract,
        engine: Engine,
        buffers: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.forward, self.backward = forward, backward
        self.contract, self.engine, self.buffers = contract, engine, buffers
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, leaves: list[Any]) -> list[Tensor]:
        """Run forward; return its output leaves in order."""
        call = Call(leaves)
        if not self.contract.is_training:
            with torch.no_grad():
                return self.run_forward(call)
        inputs = [leaves[i] for i in self.contract.input_grads]
        return list(_Step.apply(self, call, self._anchor, *inputs))

    # -- the two halves ---------------------------------------------------------------------
    def run_forward(self, call: Call) -> list[Tensor]:
        engine = self.engine
        if self.contract.is_training:
            engine.store.rest()
        kind = "forward" if self.contract.is_training else "inference"
        self._agree(f"{kind} of {self.contract.label}", f"stale={engine.stale()}")
        with self._guard(), self._own_random():
            outs, updates, saved = self.forward(
                engine, engine.store.shards, self.buffers(), call.leaves
            )
        self._apply_updates(call, updates)
        call.writes = engine.store.writes
        call.saved = saved
        call.versions = [saved[i]._version for i in self.contract.guarded]
        return outs

    def run_backward(self, call: Call, incoming: Sequence[Tensor | None]) -> list[Tensor]:
        engine = self.engine
        saved = self._take_saved(call)
        tangents = self._tangents(incoming)
        if engine.store.poll_writes() != call.writes:
            raise GradientError(
                f"{self.contract.label}: the parameters were changed (by an optimizer step, a load "
                "or an in-place write) between this forward and its backward, so its gradients "
                "would be wrong; run backward before the change"
            )
        self._agree(f"backward of {self.contract.label}", f"no_sync={engine.no_sync}")
        with self._guard(), torch.no_grad():
            assert self.backward is not None
            grads = self.backward(engine, engine.store.shards, saved, tangents)
        engine.rest()
        return grads

    def _agree(self, what: str, state: str) -> None:
        """Make sure that every rank is about to launch the same collectives."""
        world = self.engine.world
        if world.size > 1:
            world.agree(what, f"{self.contract.digest};{state}")

    def _take_saved(self, call: Call) -> list[Tensor]:
        if torch.is_grad_enabled():
            raise GradientError(
                f"{self.contract.label}: create_graph=True needs gradients of gradients, which a "
                "compiled backward does not have; use the uncompiled model for double backward"
            )
        if call.saved is None:
            raise GradientError(
                f"{self.contract.label}: backward ran a second time, but its saved values are "
                "gone; pass retain_graph=True the first time"
            )
        for position, version in zip(self.contract.guarded, call.versions, strict=True):
            if call.saved[position]._version != version:
                raise GradientError(
                    f"{self.contract.label}: an input or output that backward needs was changed in "
                    "place after forward; clone it before changing it"
                )
        saved = call.saved
        if compat.keeps_graph():
            return list(saved)
        call.saved = None
        return saved

    def _tangents(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        contract = self.contract
        tangents: dict[int, Tensor] = {}
        for leaf, grad in zip(contract.outputs, grads, strict=True):
            if leaf not in contract.tangents:
                if grad is not None:
                    raise GradientError(
                        f"{contract.label}: output {contract.names.get(leaf, leaf)!r} received a "
                        f"gradient, but only {self._loss_names()} is differentiated; compile with "
                        'Plan(differentiate="all")'
                    )
                continue
            shape, strides, dtype = contract.tangents[leaf]
            if grad is None:
                grad = torch.zeros(shape, dtype=dtype, device=self.engine.world.device)
            if grad.stride() != strides:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=grad.device)
                grad = made.copy_(grad)
            tangents[leaf] = grad
        return tangents

    def _loss_names(self) -> str:
        names = [repr(self.contract.names.get(i, i)) for i in sorted(self.contract.tangents)]
        return ", ".join(names)

    def _apply_updates(self, call: Call, updates: list[Tensor]) -> None:
        if not updates:
            return
        buffers = self.buffers()
        with torch.no_grad():
            for (kind, where), new in zip(self.contract.updates, updates, strict=True):
                target = buffers[str(where)] if kind == "buffer" else call.leaves[int(where)]
                target.copy_(new)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Run with autocast off (the user's casts are in the graph); clean up after a failure."""
        device = self.engine.world.device.type
        try:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    yield
            else:
                yield
        except BaseException:
            self.engine.abandon()
            raise

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Draw from a stream of this rank's own; the user's generator moves alike on all ranks."""
        world = self.engine.world
        if not self.contract.is_random or world.size == 1:
            yield
            return
        generator = _generator(world.device)
        seed = int(torch.randint(0, 2**62, (), generator=torch.default_generator))
        before = generator.get_state()
        generator.manual_seed((seed + world.rank * 0x9E3779B97F4A7C15) % 2**63)
        try:
            yield
        finally:
            generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class _Step(torch.autograd.Function):
    """Ties a program into autograd; parameters are no inputs of it, the anchor stands for them."""

    @staticmethod
    def forward(ctx: Any, run: Executable, call: Call, anchor: Tensor, *inputs: Tensor) -> Any:
        outs = run.run_forward(call)
        ctx.run, ctx.call = run, call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o in outs if not o.is_floating_point()])
        call.leaves = []
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.run.run_backward(ctx.call, grads)
