"""One call of a program: forward, what it saves, and the backward that autograd asks for."""

from __future__ import annotations

import contextlib
import zlib
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
from zerofx.runtime.engine import Engine
from zerofx.runtime.gradients import EVERYTHING, Asked
from zerofx.runtime.turns import ADDED, DISCARDED, RETURNED


@dataclass(frozen=True)
class Reach:
    """What has a gradient from one output: parameters by name, inputs by leaf."""

    params: frozenset[str]
    inputs: frozenset[int]


TangentForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Contract:
    """What a program's emitted functions take and give, by leaf numbers.

    outputs: leaf numbers of the forward's outputs, in their order.
    differentiable: those that may receive a gradient; others raise when they do.
    names: output leaf -> its name, for errors.
    tangents: output leaf -> (shape, strides, dtype) of the gradient that backward takes.
    tangents_at: returns the same for a call with these leaves, where it depends on their sizes.
    input_grads: input leaves whose gradients backward returns, in order.
    updates: (kind, name or leaf) of each updated buffer or input, in order.
    guarded: whose memory saved values lie in and the user can write to: ("input", leaf),
        ("buffer", name) or ("output", position); a view of it that is saved counts too.
    shared: positions in `saved` of values that are outputs as they stand.
    returned: positions of outputs that are inputs as they stand -> the input's leaf.
    detached: positions of outputs that lie in inputs which no gradient is asked for.
    constant: positions of outputs that require no grad.
    reach: output leaf -> what has a gradient from it. A loss leaves the rest as it is: None, or
        what an earlier backward has left there.
    digest: readable "name=value" items that must be equal on all ranks before a call.
    shares: graph -> its collectives, for ranks that take part in them without running it
        (`runtime.turns`).
    graph: hashes of the sizes of the inputs and of the captured graph (see `Agreement.agree`).
    """

    outputs: tuple[int, ...]
    differentiable: frozenset[int]
    names: dict[int, str]
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
    draws: frozenset[str]  # of "forward" and "backward": those that draw random numbers
    label: str
    digest: str
    shares: Mapping[str, str] = field(default_factory=dict)
    graph: bytes = NO_GRAPH
    tangents_at: Callable[[Sequence[Any]], dict[int, TangentForm]] | None = None


@dataclass
class Call:
    """What crosses from one forward to its backward; no other call shares it."""

    leaves: list[Any]
    saved: list[Tensor] | None = None
    writes: int = 0
    watched: list[tuple[str, Tensor, int]] = field(default_factory=list)  # name, alias, version
    tangents: dict[int, TangentForm] = field(default_factory=dict)
    turn: int | None = None  # its number, where ranks take turns
    sizes: Any = None  # those that vary, where somebody counts


Explain = Callable[[BaseException, Sequence[Any], dict[str, Tensor]], BaseException]
"""Returns the error to raise for one that a call raised, given its input leaves and the buffers."""


class Executable:
    """A loaded program bound to a model's engine: call it with input leaves."""

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
        # What a program that was given up needs again for the backward of an earlier forward.
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
                return self.run_forward(call)
        inputs = [leaves[i] for i in self.contract.input_grads]
        outs = list(_Step.apply(self, call, self._anchor.output, *inputs))
        for position, leaf in self.contract.returned.items():
            if position in self.contract.detached:
                outs[position] = leaves[leaf]
        return outs

    def _check_primal(self, leaves: list[Any]) -> None:
        """Raise for inputs with a tangent of forward-mode differentiation."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise GradientError(
                f"{self.contract.label}: a dual tensor asks for forward-mode differentiation, "
                "which a program does not have. Use backward(), or the uncompiled model."
            )

    def _check_apart(self, leaves: list[Any]) -> None:
        """Raise if an input that forward writes to shares memory with another one."""
        ranges = {i: memory_range(t) for i, t in enumerate(leaves) if isinstance(t, Tensor)}
        for i in self._written:
            memory, start, end = ranges[i]
            for j, (other, first, last) in ranges.items():
                if j != i and memory == other and max(start, first) < min(end, last):
                    raise CaptureError(
                        f"{self.contract.label}: forward writes to input {i} in place, and input "
                        f"{j} shares memory with it (both counted from 0), so that a program would "
                        "read values from before that write. Pass a copy of one of them (clone())."
                    )

    # -- the two halves ---------------------------------------------------------------------
    def run_forward(self, call: Call) -> list[Tensor]:
        engine = self.engine
        if self.contract.is_training and not engine.keeps_memory:
            engine.store.grads.rest()
        kind = "forward" if self.contract.is_training else "inference"
        engine.store.ledger.check_whole(f"{kind} of {self.contract.label}")
        if engine.turns.are_taken:
            call.turn = engine.turns.forward(self.contract.label, self.contract.shares["forward"])
        else:
            state = f"buckets to gather again={engine.stale()}"
            self._agree(f"{kind} of {self.contract.label}", state)
        if not self._has_compared:
            self._compare_inputs(call.leaves)
        with self.guard(call.leaves), self._own_random("forward"):
            outs, updates, saved = self.forward(
                engine, engine.store.shards, self.buffers(), call.leaves
            )
            engine.away.settle_all()
            engine.away.tell(f"{kind} of {self.contract.label}")
        if self.contract.is_training:  # a view that is made in here could not be written to
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

    def _compare_inputs(self, leaves: Sequence[Any]) -> None:
        """Raise at a program's first call unless ranks that share layers are given the same.

        Raises:
            ShardError: on all of them; names the input and what a sampler needs.
        """
        self._has_compared = True
        for name, what in _SHARING.items():
            axis = self.engine.world.axis(name)
            if axis.size == 1:
                continue
            mine = torch.stack([_digest(leaf) for leaf in leaves])
            found = mine.new_empty(axis.size * mine.numel())
            axis.all_gather(found, mine, "digests of inputs").wait()
            differ = (found.view(axis.size, -1) != mine).any(0).nonzero().flatten().tolist()
            if differ:
                world = self.engine.world
                raise ShardError(
                    f"{self.contract.label}: input {differ[0]} (counted from 0) differs between "
                    f"the {axis.size} ranks that {what} (Plan.parallel.{name}), which need the "
                    "same samples. Divide them by DistributedSampler(dataset, num_replicas="
                    "model.zerofx.data_world, rank=model.zerofx.data_rank): here "
                    f"{world.data_size} and {world.data_rank}"
                )

    # -- what a pipeline runs -------------------------------------------------------------------
    def compare_inputs(self, micro_batches: Sequence[Sequence[Any]]) -> None:
        """Raise at the first call unless ranks that share the model are given the same."""
        if not self._has_compared:
            self._compare_inputs([leaf for leaves in micro_batches for leaf in leaves])

    def seed(self) -> int:
        """Return the seed of what one half of a program draws, as the user's generator has it."""
        return int(torch.randint(0, 2**62, (), generator=torch.default_generator))

    def run_part_forward(self, leaves: list[Any], seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Run forward alone, within `guard` and without agreeing; return outputs and saved."""
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
        """Run backward alone, likewise; return the gradients of inputs."""
        engine = self.engine
        engine.gradients.updates.begin()
        for leaf, grad in tangents.items():
            shape, strides, dtype = self.contract.tangents[leaf]
            if grad.stride() != strides:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=grad.device)
                tangents[leaf] = made.copy_(grad)
        with self._seeded("backward", seed):
            assert self.backward is not None
            grads: list[Tensor] = self.backward(engine, engine.store.shards, saved, tangents)
        engine.rest(is_last)
        if engine.tally is not None:
            engine.tally(self, Call([]), "backward")
        return grads

    def _watch(self, call: Call, outs: Sequence[Tensor]) -> list[tuple[str, Tensor, int]]:
        """Return what backward needs unchanged, as aliases: they share its version counter."""
        found = []
        for kind, where in self.contract.guarded:
            if kind == "input":
                held = call.leaves[int(where)]
            else:
                held = self.buffers()[str(where)] if kind == "buffer" else outs[int(where)]
            if not held.is_inference():  # those count no versions
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
                "forward and its backward, so its gradients would be wrong; run backward before "
                "the change"
            )
        gradients = engine.gradients
        gradients.discards = named is not None and not named
        if not gradients.discards:
            gradients.updates.begin()
        if self.slots:
            engine.reserve(self.slots)
        state = (
            f"no_sync={gradients.no_sync};inputs_only={gradients.discards};"
            f"adds to gradients={engine.store.grads.are_shown}"
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
                    assert self.backward is not None
                    grads = self.backward(engine, engine.store.shards, saved, tangents)
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
        """Return the parameters that the backward now running was called for, None for all.

        Of autograd.grad(loss, x) or backward(inputs=[x]) they are those among x. The second list
        has those whose gradients autograd.grad is to return.
        """
        if will_run(self._anchor.always):  # users cannot name it, so no parameter was named
            return None, []
        if not will_run(self._anchor.through):
            return [], []
        asked = {name: asks_for(node) for name, node in self._anchor.nodes.items()}
        named = [name for name, how in asked.items() if how]
        return named, [name for name in named if asked[name] == "return"]

    def _check_returns(self, name: str) -> None:
        """Raise unless gradients can be returned and p.grad left alone."""
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
        """Make sure that ranks run the same backward; return which parameters get a gradient.

        used: the outputs that this rank's loss uses. Where ranks use different ones, a parameter
        that one rank's loss reaches gets the mean with zeros from the others.
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
        """Return which parameters get a gradient from these outputs, used here or anywhere."""
        reach = self.contract.reach
        if named is None and len(used) == len(reach):
            return EVERYTHING
        given = frozenset(name for leaf in used for name in reach[leaf].params)
        received = frozenset(name for leaf in anywhere for name in reach[leaf].params)
        if named is None:
            return Asked(given, received)
        return Asked(given.intersection(named), received.intersection(named))

    def _of_used(self, grads: list[Tensor], used: list[int]) -> list[Tensor | None]:
        """Return the gradients of inputs, None for those that the used outputs do not reach."""
        reach = self.contract.reach
        if len(used) == len(reach):
            return list(grads)
        reached = {leaf for output in used for leaf in reach[output].inputs}
        leaves = self.contract.input_grads
        return [g if leaf in reached else None for leaf, g in zip(leaves, grads, strict=True)]

    def _agree(self, what: str, state: str) -> None:
        """Make sure that every rank is about to launch the same collectives."""
        world = self.engine.world
        if world.size > 1:
            world.agree(what, f"{self.contract.digest};{state}", self.contract.graph)

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
            if version_of(held) != version:
                raise GradientError(
                    f"{self.contract.label}: {what}, which backward needs, was changed in "
                    "place after forward; clone it before changing it"
                )
        saved = call.saved
        if keeps_graph():
            return list(saved)
        call.saved, call.watched = None, []  # aliases would hold outputs to the end of backward
        return saved

    def _tangents(self, call: Call, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
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

        What the body raises gets the user's line; `leaves` are the inputs that it runs on.
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
        """Draw from a stream of this rank's own; the user's generator moves alike on all ranks."""
        world = self.engine.world
        if graph not in self.contract.draws or world.size == 1:
            yield
            return
        with self._seeded(graph, self.seed()):
            yield

    @contextlib.contextmanager
    def _seeded(self, graph: str, seed: int) -> Iterator[None]:
        """Draw what a graph draws from the stream of a seed, which is another one on each rank."""
        world = self.engine.world
        if graph not in self.contract.draws:
            yield
            return
        generator = _generator(world.device)
        before = generator.get_state()
        for name in ("tensor", "context"):
            axis = world.axis(name)
            if axis.size > 1:  # who shares a layer draws the same for what all of them have
                box = torch.tensor([seed], device=world.device)
                axis.broadcast(box, 0, "seed of what forward draws").wait()
                seed = int(box)
        stream = world.data_rank + world.axis("pipeline").rank * world.data_size
        generator.manual_seed((seed + stream * 0x9E3779B97F4A7C15) % 2**63)
        try:
            yield
        finally:
            generator.set_state(before)


# The axes along which ranks have the same samples, and what these ranks do.
_SHARING = {
    "tensor": "share each layer", "context": "share each sequence",
    "pipeline": "have layers of the model each",
}  # fmt: skip


def _digest(leaf: Any) -> Tensor:
    """Return a number that tells inputs apart: of a tensor's bytes and shape, int64 []."""
    if not isinstance(leaf, Tensor):
        return torch.tensor(zlib.crc32(repr(leaf).encode()))
    flat = leaf.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return torch.tensor(zlib.crc32(str(tuple(leaf.shape)).encode()))
    held = flat.view(torch.uint8).numpy().tobytes()
    return torch.tensor(zlib.crc32(held, zlib.crc32(str(tuple(leaf.shape)).encode())))


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class _Step(torch.autograd.Function):
    """Ties a program into autograd; one input, the anchor, stands for all parameters."""

    @staticmethod
    def forward(ctx: Any, run: Executable, call: Call, anchor: Tensor, *inputs: Tensor) -> Any:
        outs = run.run_forward(call)
        for position in run.contract.returned:  # autograd would take the user's own as ours
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
