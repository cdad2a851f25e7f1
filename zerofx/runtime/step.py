"""Program call: one forward, the values it saves, and the backward that autograd requests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zerofx.comm.board import NO_GRAPH
from zerofx.compat.autograd import asks_for, dual_level, keeps_graph, will_run
from zerofx.compat.tensors import as_own_tensor, memory_range, version_of
from zerofx.errors import CaptureError, GradientError, ShardError
from zerofx.runtime.engine import Engine, input_digest
from zerofx.runtime.gradients import EVERYTHING, Asked
from zerofx.runtime.regions.contest import Both
from zerofx.runtime.regions.swap import Swap
from zerofx.runtime.turns import ADDED, DISCARDED, RETURNED

log = logging.getLogger("zerofx")


@dataclass(frozen=True)
class Reach:
    """Parameters (by name) and inputs (by leaf) that get a gradient from one output."""

    params: frozenset[str]
    inputs: frozenset[int]


TangentForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Contract:
    """The signature of a program's emitted functions, by leaf numbers.

    outputs: leaf numbers of the forward's outputs, in order.
    differentiable: the outputs that may receive a gradient; others raise if they do.
    names: output leaf -> its name, for errors.
    inputs: input leaf -> its name in the call ("x", "pair[0]"), if a graph reads it.
    tangents: output leaf -> (shape, strides, dtype) of the gradient that backward takes.
    tangents_at: returns the same for a call with these leaves, if it depends on their sizes.
    input_grads: input leaves whose gradients backward returns, in order.
    updates: (kind, name or leaf) of each updated buffer or input, in order.
    guarded: saved values whose memory the user can write to: ("input", leaf), ("buffer", name) or
        ("output", position); a saved view of one counts too.
    shared: positions in `saved` of values that are outputs themselves.
    returned: positions of outputs that are inputs themselves -> the input's leaf.
    detached: positions of outputs that share memory with inputs that need no gradient.
    constant: positions of outputs that require no grad.
    reach: output leaf -> the parameters and inputs that get a gradient from it. A loss leaves the
        gradients of all others as they are: None, or the result of an earlier backward.
    digest: readable "name=value" items that must be equal on all ranks before a call.
    shares: graph -> its collectives, for ranks that take part in them without running it
        (`runtime.turns`).
    graph: hashes of the sizes of the inputs and of the captured graph (see `Agreement.agree`).
    """

    outputs: tuple[int, ...]
    differentiable: frozenset[int]
    names: dict[int, str]
    inputs: dict[int, str]
    tangents: dict[int, TangentForm]
    input_grads: tuple[int, ...]
    updates: tuple[tuple[str, str | int], ...]
    guarded: tuple[tuple[str, str | int], ...]
    shared: tuple[int, ...]
    returned: dict[int, int]
    detached: frozenset[int]
    constant: frozenset[int]
    reach: dict[int, Reach]
    is_training: bool
    draws: frozenset[str]  # the graphs, "forward" or "backward", that draw random numbers
    label: str
    digest: str
    shares: Mapping[str, str] = field(default_factory=dict)
    graph: bytes = NO_GRAPH
    tangents_at: Callable[[Sequence[Any]], dict[int, TangentForm]] | None = None

    def input(self, leaf: int) -> str:
        """Name an input for an error."""
        name = self.inputs.get(leaf)
        return f"input {name}" if name else f"input {leaf} (counted from 0)"


@dataclass
class Call:
    """State that one forward passes to its backward; no other call shares it."""

    leaves: list[Any]
    saved: list[Tensor] | None = None
    writes: int = 0
    watched: list[tuple[str, Tensor, int]] = field(default_factory=list)  # name, alias, version
    tangents: dict[int, TangentForm] = field(default_factory=dict)
    turn: int | None = None  # its number, if ranks take turns
    backward: Callable[..., Any] | None = None  # of the form that its forward ran in
    sizes: Any = None  # the dynamic sizes, if a tally is kept


Explain = Callable[[BaseException, Sequence[Any], dict[str, Tensor]], BaseException]
"""Returns the error to raise in place of one from a call, given its input leaves and buffers."""


class Executable:
    """A loaded program bound to a model's engine; call it with input leaves."""

    def __init__(
        self,
        forward: Callable,
        backward: Callable | None,
        contract: Contract,
        engine: Engine,
        buffers: Callable[[], dict[str, Tensor]],
        explain: Explain,
    ) -> None:
        self.forward, self.backward = forward, backward
        self.contract, self.engine, self.buffers = contract, engine, buffers
        self._explain = explain
        # Under Plan(kernels="auto"), the form with compiled regions until it is swapped in.
        self.swap: Swap | None = None
        self.contested: Mapping[str, Both] = {}  # the regions whose two forms are compared
        self.is_auto = False
        self.calls, self.since = 0, 1  # forwards so far; the first of the form that runs now
        self.keeps_form = False  # while it is recorded
        # Values that a discarded program needs again for the backward of an earlier forward.
        self.slots: Sequence[int] = ()
        self._anchor = engine.gradients.anchor()
        self._has_compared = False
        self._written = [int(where) for kind, where in contract.updates if kind == "input"]

    def __call__(self, leaves: list[Any]) -> list[Tensor]:
        """Run forward; return its output leaves in order."""
        contract = self.contract
        at_sizes = contract.tangents_at
        call = Call(leaves, tangents=contract.tangents if at_sizes is None else at_sizes(leaves))
        if dual_level() >= 0:
            self._check_primal(leaves)
        if self._written:
            self._check_apart(leaves)
        if not self.contract.is_training:
            with torch.no_grad():
                outs = self.run_forward(call)
            self.engine.rest_slots()
            return outs
        inputs = [leaves[i] for i in self.contract.input_grads]
        outs = list(_Step.apply(self, call, self._anchor.output, *inputs))
        for position, leaf in self.contract.returned.items():
            if position in self.contract.detached:
                outs[position] = leaves[leaf]
        return outs

    def _check_primal(self, leaves: list[Any]) -> None:
        """Raise if an input carries a tangent of forward-mode differentiation."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise GradientError(
                f"{self.contract.label}: a dual tensor asks for forward-mode differentiation, "
                "which a program does not have. Use backward(), or the uncompiled model."
            )

    def _check_apart(self, leaves: list[Any]) -> None:
        """Raise if an input that forward writes to shares memory with another input."""
        ranges = {i: memory_range(t) for i, t in enumerate(leaves) if isinstance(t, Tensor)}
        for i in self._written:
            memory, start, end = ranges[i]
            for j, (other, first, last) in ranges.items():
                if j != i and memory == other and max(start, first) < min(end, last):
                    raise CaptureError(
                        f"{self.contract.label}: forward writes to {self.contract.input(i)} in "
                        f"place, and {self.contract.input(j)} shares memory with it, so a program "
                        "would read values from before that write. Pass a copy of one of them "
                        "(clone())."
                    )

    # -- the two halves ---------------------------------------------------------------------
    def run_forward(self, call: Call) -> list[Tensor]:
        engine = self.engine
        if self.contract.is_training:
            engine.store.grads.rest()
        kind = "forward" if self.contract.is_training else "inference"
        engine.store.ledger.check_whole(f"{kind} of {self.contract.label}")
        if engine.turns.are_taken:
            call.turn = engine.turns.forward(self.contract.label, self.contract.shares["forward"])
        else:
            state = f"buckets to gather again={engine.stale()}"
            self._agree_on_form(f"{kind} of {self.contract.label}", state)
        self.calls += 1
        call.backward = self.backward
        if self.contract.is_training:
            engine.samples.see(self.contract.label, call.leaves)
        if not self._has_compared:
            self._compare_inputs([call.leaves])
        with self.guard(call.leaves), self._own_random("forward"):
            outs, updates, saved = self.forward(
                engine, engine.store.shards, self.buffers(), call.leaves
            )
            engine.away.settle_all()
            engine.away.tell(f"{kind} of {self.contract.label}")
        if self.contract.is_training:  # a view created in here could not be written to
            outs = [as_own_tensor(out) for out in outs]
        self._apply_updates(call, updates)
        call.writes = engine.store.writes
        for position in self.contract.shared:  # the output itself will refer to this call
            saved[position] = saved[position].detach()
        call.saved = saved
        call.watched = self._watch(call, outs)
        if engine.tally is not None:
            engine.tally(self, call, "forward")
        return outs

    def _compare_inputs(self, micro_batches: Sequence[Sequence[Any]]) -> None:
        """Raise at a program's first call unless ranks that share layers get the same inputs.

        Raises:
            ShardError: on all of these ranks; names the input and the sampler arguments to use.
        """
        self._has_compared = True
        leaves = [leaf for each in micro_batches for leaf in each]
        for name, what in _SHARING.items():
            axis = self.engine.world.axis(name)
            if axis.size == 1 or not leaves:  # none: it only gathers parameters for eager code
                continue
            mine = torch.stack([input_digest(leaf) for leaf in leaves])
            found = mine.new_empty(axis.size * mine.numel())
            axis.all_gather(found, mine, "digests of inputs").wait()
            differ = (found.view(axis.size, -1) != mine).any(0).nonzero().flatten().tolist()
            if differ:
                world = self.engine.world
                given = self.contract.input(differ[0] % len(micro_batches[0]))
                raise ShardError(
                    f"{self.contract.label}: {given} differs between the {axis.size} ranks "
                    f"that {what} (Plan.parallel.{name}), which need the same "
                    "samples. Divide them with DistributedSampler(dataset, "
                    "num_replicas=model.zerofx.data_world, rank=model.zerofx.data_rank), here "
                    f"{world.data_size} and {world.data_rank}."
                )

    # -- pieces that a pipeline runs ----
    def compare_inputs(self, micro_batches: Sequence[Sequence[Any]]) -> None:
        """Raise at the first call unless ranks that share the model get the same inputs."""
        if not self._has_compared:
            self._compare_inputs(micro_batches)

    def seed(self) -> int:
        """Return the seed for one half of a program, drawn from the user's generator."""
        return int(torch.randint(0, 2**62, (), generator=torch.default_generator))

    def run_part_forward(self, leaves: list[Any], seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Run only forward, within `guard` and without agreement; return outputs and saved."""
        engine = self.engine
        with self._seeded("forward", seed):
            outs, updates, saved = self.forward(engine, engine.store.shards, self.buffers(), leaves)
        engine.away.settle_all()
        self._apply_updates(Call(leaves), updates)
        if engine.tally is not None:
            engine.tally(self, Call(leaves), "forward")
        return outs, saved

    def run_part_backward(
        self, saved: list[Tensor], tangents: dict[int, Tensor], seed: int, is_last: bool
    ) -> list[Tensor]:
        """Run only backward, under the same conditions; return the gradients of inputs."""
        self.engine.gradients.updates.begin()
        with self._seeded("backward", seed):
            grads: list[Tensor] = self._call_backward(saved, tangents)
        self._end_part(is_last)
        return grads

    def run_until_pause(
        self, saved: list[Tensor], tangents: dict[int, Tensor], seed: int
    ) -> tuple[list[Tensor], Iterator[Any]]:
        """Run a divided backward up to its pause; return the gradients of inputs, and the rest."""
        with self._seeded("backward", seed):
            rest: Iterator[Any] = self._call_backward(saved, tangents)
            return next(rest), rest

    def run_after_pause(self, rest: Iterator[Any], is_last: bool) -> None:
        """Run the second part of a divided backward, under the same conditions."""
        self.engine.gradients.updates.begin()
        for _ in rest:
            raise AssertionError("backward pauses twice.")
        self._end_part(is_last)

    def _call_backward(self, saved: list[Tensor], tangents: dict[int, Tensor]) -> Any:
        engine = self.engine
        for leaf, grad in tangents.items():
            shape, strides, dtype = self.contract.tangents[leaf]
            if grad.stride() != strides:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=grad.device)
                tangents[leaf] = made.copy_(grad)
        assert self.backward is not None
        return self.backward(engine, engine.store.shards, saved, tangents)

    def _end_part(self, is_last: bool) -> None:
        self.engine.rest(is_last)
        if self.engine.tally is not None:
            self.engine.tally(self, Call([]), "backward")

    def _watch(self, call: Call, outs: Sequence[Tensor]) -> list[tuple[str, Tensor, int]]:
        """Return the values that backward needs unchanged, as aliases with their versions."""
        found = []
        for kind, where in self.contract.guarded:
            if kind == "input":
                held = call.leaves[int(where)]
            else:
                held = self.buffers()[str(where)] if kind == "buffer" else outs[int(where)]
            if not held.is_inference():  # inference tensors have no version counter
                found.append((f"{kind} {where}", held.detach(), version_of(held)))
        return found

    def run_backward(self, call: Call, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        engine = self.engine
        named, returns = self._named()
        if returns:
            self._check_returns(returns[0])
        saved = self._take_saved(call)
        tangents = self._tangents(call, incoming)
        if engine.store.poll_writes() != call.writes:
            raise GradientError(
                f"{self.contract.label}: the parameters were changed (by an optimizer step, a "
                "load, an in-place write or another backward that updates them) between this "
                "forward and its backward, so its gradients would be wrong. Run backward before "
                "the change."
            )
        gradients = engine.gradients
        gradients.discards = named is not None and not named
        if not gradients.discards:
            gradients.updates.begin()
        if self.slots:
            engine.reserve(self.slots)
        adds = engine.store.grads.are_shown
        if not gradients.discards:
            gradients.has_added |= adds
            gradients.steps_before = engine.store.ledger.steps_begun
        state = (
            f"no_sync={gradients.no_sync};inputs_only={gradients.discards};adds to gradients={adds}"
        )
        if named:
            state += f";{'returned' if returns else 'accumulated'}={', '.join(named)}"
        if gradients.scaler is not None:
            tangents = gradients.scaler.begin(tangents)
        pairs = zip(self.contract.outputs, incoming, strict=True)
        used = [leaf for leaf, grad in pairs if grad is not None]
        apart: contextlib.AbstractContextManager[list[Tensor | None]]
        apart = gradients.apart(self._anchor.nodes) if returns else contextlib.nullcontext([])
        try:
            if call.turn is not None:
                given = self._asked(used, used, named).given
                wish = RETURNED if returns else DISCARDED if gradients.discards else ADDED
                shares = self.contract.shares["backward"]
                received = engine.turns.backward(
                    call.turn, self.contract.label, shares, wish, given
                )
                gradients.asked = Asked(given, received)
            else:
                gradients.asked = self._agree_on_asked(used, named, state)
            with apart as found:
                with self.guard(), torch.no_grad(), self._own_random("backward"):
                    assert call.backward is not None
                    grads = call.backward(engine, engine.store.shards, saved, tangents)
                engine.rest()
            self._anchor.add(found)
        except BaseException:
            self._anchor.returned.clear()
            raise
        finally:
            gradients.discards, gradients.asked = False, EVERYTHING
        if engine.tally is not None:
            engine.tally(self, call, "backward")
        if gradients.scaler is not None:
            grads = gradients.scaler.unscaled(grads)
        return self._of_used(grads, used)

    def _named(self) -> tuple[list[str] | None, list[str]]:
        """Return the parameters that the running backward was called for; None means all.

        For autograd.grad(loss, x) or backward(inputs=[x]) they are the parameters among x. The
        second list has the parameters whose gradients autograd.grad is to return.
        """
        # Users cannot request it, so no parameter was requested either.
        if will_run(self._anchor.always):
            return None, []
        if not will_run(self._anchor.through):
            return [], []
        asked = {name: asks_for(node) for name, node in self._anchor.nodes.items()}
        named = [name for name, how in asked.items() if how]
        return named, [name for name in named if asked[name] == "return"]

    def _check_returns(self, name: str) -> None:
        """Raise unless gradients can be returned and p.grad left unchanged."""
        gradients = self.engine.gradients
        if self.engine.store.updates is not None:
            why = "Plan(update='in-backward') uses and frees it inside backward"
        elif gradients.no_sync or gradients.holds_sums:
            why = "no_sync() sums gradients in p.grad until a backward outside reduces them"
        elif gradients.scaler is not None:
            why = "a step whose loss scale overflows leaves none"
        else:
            return
        raise GradientError(
            f"{name}: torch.autograd.grad, or a pipeline schedule that splits backward, asks for "
            f"its gradient as a result, but {why}. Call loss.backward() and read p.grad."
        )

    def _agree_on_asked(self, used: list[int], named: list[str] | None, state: str) -> Asked:
        """Check that all ranks run the same backward; return which parameters get a gradient.

        used: the outputs that this rank's loss uses. If ranks use different outputs, a parameter
            that only one rank's loss reaches gets the mean, with zeros from the other ranks.
        """
        choice = " ".join(map(str, used))
        found = self.engine.world.agree_but_for(
            f"backward of {self.contract.label}",
            f"{self.contract.digest};{state}",
            f"outputs={choice}",
            self.contract.graph,
        )
        anywhere = [int(leaf) for each in found for leaf in each.partition("=")[2].split()]
        return self._asked(used, anywhere, named)

    def _asked(
        self, used: Sequence[int], anywhere: Sequence[int], named: list[str] | None
    ) -> Asked:
        """Return the parameters that get a gradient from outputs used here or on any rank."""
        reach = self.contract.reach
        if named is None and len(used) == len(reach):
            return EVERYTHING
        given = frozenset(name for leaf in used for name in reach[leaf].params)
        received = frozenset(name for leaf in anywhere for name in reach[leaf].params)
        if named is None:
            return Asked(given, received)
        return Asked(given.intersection(named), received.intersection(named))

    def _of_used(self, grads: list[Tensor], used: list[int]) -> list[Tensor | None]:
        """Return the gradients of inputs, None for inputs that the used outputs do not reach."""
        reach = self.contract.reach
        if len(used) == len(reach):
            return list(grads)
        reached = {leaf for output in used for leaf in reach[output].inputs}
        leaves = self.contract.input_grads
        return [g if leaf in reached else None for leaf, g in zip(leaves, grads, strict=True)]

    def _agree_on_form(self, what: str, state: str) -> None:
        """Make sure that every rank is about to launch the same collectives; swap if all can."""
        world, digest = self.engine.world, f"{self.contract.digest};{state}"
        if not self.is_auto:
            if world.size > 1:
                world.agree(what, digest, self.contract.graph)
            return
        mine = self.form()
        if self.is_swapped_by(world.agree_but_for(what, digest, mine, self.contract.graph)):
            self.compiled()

    # -- Plan(kernels="auto"): ATen until all ranks have compiled regions --------------------------
    def form(self) -> str:
        """Return what this rank announces: whether it could run compiled regions, or does."""
        is_ready = self.swap is None or (not self.keeps_form and self.swap.exists())
        return f"compiled regions={'ready' if is_ready else 'not yet'}"

    def is_swapped_by(self, forms: set[str]) -> bool:
        """Tell whether this call, for which ranks announced these forms, swaps them."""
        return self.swap is not None and forms == {"compiled regions=ready"}

    def compiled(self) -> None:
        """Run compiled regions from the next call on; earlier ones go on to their backwards."""
        assert self.swap is not None
        self.forward, self.backward = self.swap.take()  # type: ignore[assignment]
        self.contested = self.swap.regions
        if self.calls:
            log.info("%s: runs compiled regions from call %d on", self.swap.label, self.calls + 1)
        self.swap, self.since = None, self.calls + 1

    def _take_saved(self, call: Call) -> list[Tensor]:
        if torch.is_grad_enabled():
            raise GradientError(
                f"{self.contract.label}: create_graph=True needs gradients of gradients, which a "
                f"compiled backward does not have. {self.engine.double_backward()}"
            )
        if call.saved is None:
            raise GradientError(
                f"{self.contract.label}: backward ran a second time, but its saved values are "
                "gone. Pass retain_graph=True the first time."
            )
        for what, held, version in call.watched:
            if version_of(held) != version:
                raise GradientError(
                    f"{self.contract.label}: {what}, which backward needs, was changed in place "
                    "after forward. Clone it before changing it."
                )
        saved = call.saved
        if keeps_graph():
            return list(saved)
        # The aliases would keep outputs alive until the end of backward.
        call.saved, call.watched = None, []
        return saved

    def _tangents(self, call: Call, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        contract = self.contract
        tangents: dict[int, Tensor] = {}
        for leaf, grad in zip(contract.outputs, grads, strict=True):
            if leaf not in contract.tangents:
                if grad is not None:
                    raise GradientError(
                        f"{contract.label}: output {contract.names.get(leaf, leaf)!r} received a "
                        f"gradient, but only {self._loss_names()} is differentiated. Compile with "
                        "Plan(differentiate='all')."
                    )
                continue
            shape, strides, dtype = call.tangents[leaf]
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
    def guard(self, leaves: Sequence[Any] = ()) -> Iterator[None]:
        """Run with autocast off (the user's casts are in the graph); clean up after a failure.

        An exception from the body is annotated with the user's line; `leaves` are the call's
        inputs.
        """
        device = self.engine.world.device.type
        try:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    yield
            else:
                yield
        except BaseException as error:
            raised = self._explain(error, leaves, self.buffers())
            self.engine.abandon(raised)
            if raised is error:
                raise
            raise raised  # noqa: B904  (its cause is set)

    @contextlib.contextmanager
    def _own_random(self, graph: str) -> Iterator[None]:
        """Draw from this rank's own stream; the user's generator advances alike on all ranks."""
        world = self.engine.world
        if graph not in self.contract.draws or world.size == 1:
            yield
            return
        with self._seeded(graph, self.seed()):
            yield

    @contextlib.contextmanager
    def _seeded(self, graph: str, seed: int) -> Iterator[None]:
        """Run a graph's random ops on a stream seeded by `seed` and this rank."""
        world = self.engine.world
        if graph not in self.contract.draws:
            yield
            return
        generator = _generator(world.device)
        before = generator.get_state()
        for name in ("tensor", "context"):
            axis = world.axis(name)
            if axis.size > 1:  # ranks that share a layer draw the same numbers for shared values
                box = torch.tensor([seed], device=world.device)
                axis.broadcast(box, 0, "seed of forward's random draws").wait()
                seed = int(box)
        stream = world.data_rank + world.axis("pipeline").rank * world.data_size
        generator.manual_seed((seed + stream * 0x9E3779B97F4A7C15) % 2**63)
        try:
            yield
        finally:
            generator.set_state(before)


# The axes along which ranks have the same samples, and how these ranks divide the model.
_SHARING = {
    "tensor": "share each layer",
    "context": "share each sequence",
    "pipeline": "each have some layers of the model",
}


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class _Step(torch.autograd.Function):
    """Connects a program to autograd; one input, the anchor, represents all parameters."""

    @staticmethod
    def forward(ctx: Any, run: Executable, call: Call, anchor: Tensor, *inputs: Tensor) -> Any:
        outs = run.run_forward(call)
        # Autograd would treat the user's own tensor as our output.
        for position in run.contract.returned:
            outs[position] = outs[position].detach()
        ctx.run, ctx.call = run, call
        ctx.set_materialize_grads(False)
        constant = run.contract.detached | run.contract.constant
        ctx.mark_non_differentiable(
            *[
                o
                for i, o in enumerate(outs)
                if i in constant or not (o.is_floating_point() or o.is_complex())
            ]
        )
        call.leaves = []
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.run.run_backward(ctx.call, grads)
