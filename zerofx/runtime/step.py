"""One call of a program: forward, what it saves, and the backward that autograd asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerofx.compat.autograd import keeps_graph, will_run
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
    guarded: whose memory saved values lie in and the user can write to: ("input", leaf),
        ("buffer", name) or ("output", position); a view of it that is saved counts too.
    shared: positions in `saved` of values that are outputs as they stand.
    returned: positions of outputs that are inputs as they stand -> the input's leaf.
    detached: positions of outputs that lie in inputs which no gradient is asked for.
    digest: readable "name=value" items that must be equal on all ranks before a call.
    """

    outputs: tuple[int, ...]
    differentiable: frozenset[int]
    names: dict[int, str]
    tangents: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    input_grads: tuple[int, ...]
    updates: tuple[tuple[str, str | int], ...]
    guarded: tuple[tuple[str, str | int], ...]
    shared: tuple[int, ...]
    returned: dict[int, int]
    detached: frozenset[int]
    is_training: bool
    draws: frozenset[str]  # of "forward" and "backward": those that draw random numbers
    label: str
    digest: str


@dataclass
class Call:
    """What crosses from one forward to its backward; no other call shares it."""

    leaves: list[Any]
    saved: list[Tensor] | None = None
    writes: int = 0
    watched: list[tuple[str, Tensor, int]] = field(default_factory=list)  # name, alias, version


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
        with torch.inference_mode(False):  # which may be the mode of the first call
            self._anchor = torch.zeros((), requires_grad=True)
            self._accumulate = torch.autograd.graph.get_gradient_edge(self._anchor).node

    def __call__(self, leaves: list[Any]) -> list[Tensor]:
        """Run forward; return its output leaves in order."""
        call = Call(leaves)
        if not self.contract.is_training:
            with torch.no_grad():
                return self.run_forward(call)
        inputs = [leaves[i] for i in self.contract.input_grads]
        outs = list(_Step.apply(self, call, self._anchor, *inputs))
        for position, leaf in self.contract.returned.items():
            if position in self.contract.detached:
                outs[position] = leaves[leaf]
        return outs

    # -- the two halves ---------------------------------------------------------------------
    def run_forward(self, call: Call) -> list[Tensor]:
        engine = self.engine
        if self.contract.is_training and not engine.keeps_memory:
            engine.store.grads.rest()
        kind = "forward" if self.contract.is_training else "inference"
        engine.store.ledger.check_whole(f"{kind} of {self.contract.label}")
        self._agree(f"{kind} of {self.contract.label}", f"stale={engine.stale()}")
        with self._guard(), self._own_random("forward"):
            outs, updates, saved = self.forward(
                engine, engine.store.shards, self.buffers(), call.leaves
            )
            engine.away.settle_all()
            engine.away.tell(f"{kind} of {self.contract.label}")
        self._apply_updates(call, updates)
        call.writes = engine.store.writes
        for position in self.contract.shared:  # the output itself will refer to this call
            saved[position] = saved[position].detach()
        call.saved = saved
        call.watched = self._watch(call, outs)
        return outs

    def _watch(self, call: Call, outs: Sequence[Tensor]) -> list[tuple[str, Tensor, int]]:
        """Return what backward needs unchanged, as aliases: they share its version counter."""
        found = []
        for kind, where in self.contract.guarded:
            if kind == "input":
                held = call.leaves[int(where)]
            else:
                held = self.buffers()[str(where)] if kind == "buffer" else outs[int(where)]
            if not held.is_inference():  # those count no versions
                found.append((f"{kind} {where}", held.detach(), held._version))
        return found

    def run_backward(self, call: Call, incoming: Sequence[Tensor | None]) -> list[Tensor]:
        engine = self.engine
        saved = self._take_saved(call)
        tangents = self._tangents(incoming)
        if engine.store.poll_writes() != call.writes:
            raise GradientError(
                f"{self.contract.label}: the parameters were changed (by an optimizer step, a "
                "load, an in-place write or another backward that updates them) between this "
                "forward and its backward, so its gradients would be wrong; run backward before "
                "the change"
            )
        # autograd.grad(loss, inputs) asks for no gradient of a parameter
        gradients = engine.gradients
        gradients.discards = not will_run(self._accumulate)
        if not gradients.discards:
            gradients.updates.begin()
        state = f"no_sync={gradients.no_sync};inputs_only={gradients.discards}"
        if gradients.scaler is not None:
            tangents = gradients.scaler.begin(tangents)
        try:
            self._agree(f"backward of {self.contract.label}", state)
            with self._guard(), torch.no_grad(), self._own_random("backward"):
                assert self.backward is not None
                grads = self.backward(engine, engine.store.shards, saved, tangents)
            engine.rest()
        finally:
            gradients.discards = False
        if gradients.scaler is not None:
            return gradients.scaler.unscaled(grads)
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
        for what, held, version in call.watched:
            if held._version != version:
                raise GradientError(
                    f"{self.contract.label}: {what}, which backward needs, was changed in "
                    "place after forward; clone it before changing it"
                )
        saved = call.saved
        if keeps_graph():
            return list(saved)
        call.saved, call.watched = None, []  # aliases would hold outputs to the end of backward
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
    def _own_random(self, graph: str) -> Iterator[None]:
        """Draw from a stream of this rank's own; the user's generator moves alike on all ranks."""
        world = self.engine.world
        if graph not in self.contract.draws or world.size == 1:
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
        for position in run.contract.returned:  # autograd would take the user's own as ours
            outs[position] = outs[position].detach()
        ctx.run, ctx.call = run, call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[
                o
                for i, o in enumerate(outs)
                if i in run.contract.detached or not (o.is_floating_point() or o.is_complex())
            ]
        )
        call.leaves = []
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.run.run_backward(ctx.call, grads)
