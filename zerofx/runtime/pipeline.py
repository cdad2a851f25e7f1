"""Pipeline run: this rank's pipeline stage runs each micro-batch, with sends and receives between.

A training call runs the whole schedule, forwards and backwards, and returns the mean of the
micro-batches' losses on every rank. `loss.backward()` then hands out its gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerofx.comm.collectives import Axis, Work
from zerofx.compat.autograd import will_run
from zerofx.errors import GradientError
from zerofx.policy.schedules import BACKWARD, FORWARD, Hop
from zerofx.runtime.step import Executable


@dataclass(frozen=True)
class Parcel:
    """A value sent between pipeline stages (see `ir.program.Wire`): source, targets and format."""

    name: str
    source: int
    target: int
    graph: str
    output: int
    leaf: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OwnStage:
    """What a rank knows of a pipeline stage of its own, and of all that crosses between stages.

    taken, sent: what this stage's graphs receive and send. results: the user's outputs.
    trained: parameters that some stage has gradients for. shared: those among them that several
    ranks hold, with the positions of these. loss: the output that is differentiated. puts_off:
    gradients are summed on each rank, and reduced with the last micro-batch's.
    """

    position: int
    schedule: str
    taken: Mapping[str, tuple[Parcel, ...]]
    sent: Mapping[str, tuple[Parcel, ...]]
    results: tuple[Parcel, ...]
    trained: tuple[str, ...]
    shared: Mapping[str, tuple[int, ...]]
    loss: int | None
    puts_off: bool
    digest: str


@dataclass
class _TrainingStep:
    """A training step under way: what it runs on, and what stands between its moves."""

    micro_batches: Sequence[list[Any]]
    seeds: list[tuple[int, int]]
    saved: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    waiting: dict[tuple[int, int], Iterator[Any]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    made: dict[tuple[Parcel, int], Tensor] = field(default_factory=dict)
    left: int = 0  # backwards that have not run

    @property
    def num(self) -> int:
        return len(self.micro_batches)


Moves = Callable[["PipelineRun"], None]


class PipelineRun:
    """Runs the calls of a pipeline, all stages together: this rank's stages, in order.

    moves: returns what a rank does in a training step of so many micro-batches, as a function that
    calls `receive`, `forward`, `send` and `backward` of what it is given, or in place of the last
    `backward_input` and `backward_weights`. It is that of the emitted `pipeline.py`.
    """

    def __init__(
        self,
        executables: Sequence[Executable],
        parts: Sequence[OwnStage],
        moves: Callable[[int], Moves],
    ) -> None:
        self.executable, self.part = executables[0], parts[0]
        self._stages = {p.position: (e, p) for e, p in zip(executables, parts, strict=True)}
        self._moves = moves
        self._engine = self.executable.engine
        self._axis: Axis = self._engine.world.axis("pipeline")
        self._leaves = {
            p.position: {leaf: i for i, leaf in enumerate(e.contract.outputs)}
            for e, p in self._stages.values()
        }
        self._anchor = self._engine.gradients.anchor()
        self._parcels = {
            (c.name, c.source, c.target): c
            for p in parts
            for each in (p.taken, p.sent)
            for crossings in each.values()
            for c in crossings
        }
        self._sending: dict[Parcel, deque[tuple[Work, Tensor]]] = {}
        self._receiving: dict[tuple[Parcel, int], tuple[Tensor, Work]] = {}
        self._step: _TrainingStep | None = None
        digest = hashlib.sha256(self.part.digest.encode()).hexdigest()[:12]
        self._digest = f"pipeline={self.part.schedule}:{digest}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the user's outputs, in the order in which calls return them."""
        return tuple(result.leaf for result in self.part.results)

    def __call__(self, micro_batches: Sequence[list[Any]]) -> list[Tensor]:
        """Run a call on the input leaves of its micro-batches; return the user's outputs."""
        contract, world = self.executable.contract, self._engine.world
        kind = "training step" if contract.is_training else "inference"
        what = f"{kind} of {contract.label}"
        self._engine.store.ledger.check_whole(what)
        state = f"micro_batches={len(micro_batches)}"
        mine = " ".join(map(str, [self._axis.rank, *self._engine.stale()]))
        choices = world.agree_but_for(what, f"{self._digest};{state}", f"again={mine}")
        self._gather_again(choices)
        self.executable.compare_inputs(micro_batches)
        if not contract.is_training:
            return self._infer(micro_batches[0])
        return [_Trained.apply(self, micro_batches, self._anchor.output)]

    def _gather_again(self, choices: set[str]) -> None:
        """Gather again the resident buckets that are stale on any rank of this stage."""
        for choice in choices:
            position, *buckets = map(int, choice.partition("=")[2].split())
            if position == self._axis.rank:
                self._engine.forget(buckets)

    # -- the two kinds of calls -----------------------------------------------------------------
    def _infer(self, leaves: list[Any]) -> list[Tensor]:
        self._step = step = _TrainingStep([leaves], [(self.executable.seed(), 0)])
        outs: dict[int, list[Tensor]] = {}
        with self.executable.guard(leaves), torch.no_grad():
            for position, (_, part) in sorted(self._stages.items()):
                for crossing in part.taken[FORWARD]:
                    if not self._is_mine(crossing.source):
                        self.receive(crossing.name, 0, crossing.source, position)
                outs[position] = self._forward(step, position, 0)
                for crossing in part.sent[FORWARD]:
                    if not self._is_mine(crossing.target):
                        self.send(crossing.name, 0, position, crossing.target)
            self._finish_sending()
            found = [self._share(result, outs) for result in self.part.results]
        self._step = None
        self._engine.world.level()
        return found

    def _share(self, result: Parcel, outs: Mapping[int, Sequence[Tensor]]) -> Tensor:
        """Give a result of one stage to all of them."""
        if result.source in outs:
            box = outs[result.source][self._leaves[result.source][result.output]].contiguous()
        else:
            box = torch.empty(result.shape, dtype=result.dtype, device=self._engine.world.device)
        source = result.source % self._axis.size
        self._axis.broadcast(_bytes(box), source, f"output {result.name}").wait()
        return box

    def train(self, micro_batches: Sequence[list[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run a training step's forwards and backwards; return its loss and its gradients."""
        engine, part, num = self._engine, self.part, len(micro_batches)
        engine.store.grads.rest()
        seeds = [(self.executable.seed(), self.executable.seed()) for _ in range(num)]
        step = self._step = _TrainingStep(micro_batches, seeds, left=num * len(self._stages))
        moves = self._moves(num)
        names = [n for n in part.trained if n in engine.store.params]
        with self.executable.guard(micro_batches[0]), torch.no_grad():
            with engine.gradients.apart(names) as found:
                moves(self)
                self._finish_sending()
            grads = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            self._add_shared(grads)
            loss = self._mean(step.losses, num)
        self._step = None
        engine.world.level()
        return loss, grads

    # -- what a schedule calls ------------------------------------------------------------------
    def receive(self, name: str, micro_batch: int, source: int, target: int) -> None:
        """Begin to receive a value from another rank's stage."""
        crossing = self._parcels[name, source, target]
        device = self._engine.world.device
        box = torch.empty(crossing.shape, dtype=crossing.dtype, device=device)
        label = f"{name} of micro-batch {micro_batch} from pipeline stage {source}"
        work = self._axis.receive(_bytes(box), source % self._axis.size, label)
        self._receiving[crossing, micro_batch] = box, work

    def forward(self, stage: int, micro_batch: int) -> None:
        """Run a stage's forward on a micro-batch, as soon as what it reads has come."""
        assert self._step is not None, "no step is under way"
        self._forward(self._step, stage, micro_batch)

    def backward(self, stage: int, micro_batch: int, reduces: bool = False) -> None:
        """Run its backward likewise. reduces: the sum of its gradients with those of all before."""
        step = self._step
        assert step is not None, "no step is under way"
        executable, _ = self._stages[stage]
        given = self._backward_takes(step, stage, micro_batch)
        with self._summing(step, stage, reduces):
            grads = executable.run_part_backward(*given, step.left == 0)
        self._note_gradients(step, stage, micro_batch, grads)

    def backward_input(self, stage: int, micro_batch: int) -> None:
        """Run the first part of a divided backward, as soon as what it reads has come."""
        step = self._step
        assert step is not None, "no step is under way"
        executable, _ = self._stages[stage]
        given = self._backward_takes(step, stage, micro_batch)
        grads, step.waiting[stage, micro_batch] = executable.run_until_pause(*given)
        self._note_gradients(step, stage, micro_batch, grads)

    def backward_weights(self, stage: int, micro_batch: int, reduces: bool = False) -> None:
        """Run its second part. reduces: the sum of its gradients with those of all before."""
        step = self._step
        assert step is not None, "no step is under way"
        executable, _ = self._stages[stage]
        with self._summing(step, stage, reduces):
            executable.run_after_pause(step.waiting.pop((stage, micro_batch)), step.left == 0)

    def _backward_takes(
        self, step: _TrainingStep, stage: int, micro_batch: int
    ) -> tuple[list[Tensor], dict[int, Tensor], int]:
        """Return a backward's saved values, its tangents as soon as they have come, its seed."""
        executable, part = self._stages[stage]
        tangents = self._take(step, part.taken[BACKWARD], micro_batch)
        if part.loss in executable.contract.tangents:
            shape, _, dtype = executable.contract.tangents[part.loss]
            tangents[part.loss] = torch.full(
                shape, 1.0 / step.num, dtype=dtype, device=self._engine.world.device
            )
        return step.saved.pop((stage, micro_batch)), tangents, step.seeds[micro_batch][1]

    def _note_gradients(
        self, step: _TrainingStep, stage: int, micro_batch: int, grads: Sequence[Tensor]
    ) -> None:
        executable, part = self._stages[stage]
        made = dict(zip(executable.contract.input_grads, grads, strict=True))
        for crossing in part.sent[BACKWARD]:
            step.made[crossing, micro_batch] = made[crossing.output]

    @contextlib.contextmanager
    def _summing(self, step: _TrainingStep, stage: int, reduces: bool) -> Iterator[None]:
        """Sum the gradients that are made inside, or reduce them with all before."""
        gradients = self._engine.gradients
        step.left -= 1
        gradients.no_sync = self._stages[stage][1].puts_off and not reduces
        gradients.leaves_sums = step.left > 0  # other stages of this rank go on to sum
        try:
            yield
        finally:
            gradients.no_sync = gradients.leaves_sums = False

    def send(self, name: str, micro_batch: int, source: int, target: int) -> None:
        """Send a value that a stage of this rank has made to one of another rank."""
        assert self._step is not None, "no step is under way"
        crossing = self._parcels[name, source, target]
        sending = self._sending.setdefault(crossing, deque())
        if len(sending) >= Hop(crossing.graph, source, target).ahead:
            sending.popleft()[0].wait()
        box = self._step.made.pop((crossing, micro_batch)).contiguous()
        label = f"{name} of micro-batch {micro_batch} to pipeline stage {target}"
        work = self._axis.send(_bytes(box), target % self._axis.size, label)
        sending.append((work, box))

    def _is_mine(self, stage: int) -> bool:
        return stage in self._stages

    def _forward(self, step: _TrainingStep, stage: int, micro_batch: int) -> list[Tensor]:
        executable, part = self._stages[stage]
        received = self._take(step, part.taken[FORWARD], micro_batch)
        given = [*step.micro_batches[micro_batch], *(received[c.leaf] for c in part.taken[FORWARD])]
        outs, saved = executable.run_part_forward(given, step.seeds[micro_batch][0])
        leaves = self._leaves[stage]
        for crossing in part.sent[FORWARD]:
            step.made[crossing, micro_batch] = outs[leaves[crossing.output]]
        if executable.contract.is_training:
            step.saved[stage, micro_batch] = saved
            if part.loss in leaves:
                step.losses[micro_batch] = outs[leaves[part.loss]]
        return outs

    def _mean(self, losses: Mapping[int, Tensor], num: int) -> Tensor:
        """Return on every rank the mean of the micro-batches' losses, which one stage has."""
        [result] = self.part.results
        if losses:
            mean = torch.stack([losses[i] for i in range(num)]).mean(0).contiguous()
        else:
            mean = torch.empty(result.shape, dtype=result.dtype, device=self._engine.world.device)
        self._axis.broadcast(_bytes(mean), result.source % self._axis.size, "mean loss").wait()
        return mean

    def _add_shared(self, grads: dict[str, Tensor]) -> None:
        """Sum the gradients of parameters that several ranks hold, in the order of the stages."""
        mine_at = self._axis.rank
        for name, positions in self.part.shared.items():
            if mine_at not in positions:
                continue
            piece = self._engine.store.pieces[name]
            mine = grads.get(name)
            if mine is None:
                local = self._engine.store.local_view(name)
                mine = grads[name] = piece.show(torch.zeros_like(local))
            flat = piece.local(mine)
            others = [p for p in positions if p != mine_at]
            parts = {mine_at: flat.clone()} | {p: torch.empty_like(flat) for p in others}
            label = f"gradient of {name}, which pipeline stages share"
            if flat.numel():
                works = [self._axis.receive(parts[p], p, label) for p in others]
                works += [self._axis.send(parts[mine_at], p, label) for p in others]
                for work in works:
                    work.wait()
            flat.copy_(parts[positions[0]])
            for position in positions[1:]:
                flat.add_(parts[position])

    # -- transfers --------------------------------------------------------------------------------
    def _take(
        self, step: _TrainingStep, crossings: Sequence[Parcel], micro_batch: int
    ) -> dict[int, Tensor]:
        """Wait for what a graph reads; return it by leaf."""
        found: dict[int, Tensor] = {}
        for crossing in crossings:
            if self._is_mine(crossing.source):
                box = step.made.pop((crossing, micro_batch))
            else:
                box, work = self._receiving.pop((crossing, micro_batch))
                work.wait()
            if box.stride() != crossing.strides:
                made = torch.empty_strided(
                    crossing.shape, crossing.strides, dtype=box.dtype, device=box.device
                )
                box = made.copy_(box)
            found[crossing.leaf] = box
        return found

    def _finish_sending(self) -> None:
        for sending in self._sending.values():
            while sending:
                sending.popleft()[0].wait()

    def forget(self) -> None:
        """Drop the transfers that were in flight when a call failed."""
        self._sending.clear()
        self._receiving.clear()
        self._step = None


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as flat bytes, so that transfers need no dtype."""
    return tensor.view(-1).view(torch.uint8)


class _Trained(torch.autograd.Function):
    """A training step that has already run; its backward hands out the gradients."""

    @staticmethod
    def forward(ctx: Any, run: PipelineRun, micro_batches: Any, anchor: Tensor) -> Tensor:
        try:
            loss, ctx.grads = run.train(micro_batches)
        except BaseException:
            run.forget()
            raise
        ctx.run = run
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: PipelineRun = ctx.run
        label = run.executable.contract.label
        if torch.is_grad_enabled():
            raise GradientError(
                f"{label}: create_graph=True needs gradients of gradients, which a compiled "
                "backward does not have. Use the uncompiled model for double backward"
            )
        if ctx.grads is None:
            raise GradientError(
                f"{label}: backward ran a second time, but a pipeline hands the gradients of a "
                "step out once. Call the model again"
            )
        if not will_run(run._anchor.always):
            raise GradientError(
                f"{label}: a pipeline sets p.grad of all parameters, and was asked for some "
                "gradients alone (torch.autograd.grad, or backward(inputs=...)). Call "
                "loss.backward() and read p.grad"
            )
        grads, ctx.grads = ctx.grads, None
        run._engine.gradients.hand_out(run.part.trained, grads, grad)
        return None, None, None
