"""Pipeline run: this rank's pipeline stage runs each micro-batch, with sends and receives between.

A training call runs the whole schedule, forwards and backwards, and returns the mean of the
micro-batches' losses on every rank. `loss.backward()` then hands out its gradients. If forward
returns no loss, a call runs the forwards and returns the results of the whole batch on every rank;
the caller's backward runs the backwards.
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
from zerofx.runtime.buffers import share_between_stages
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

    taken, sent: what this stage's graphs receive and send. results: the user's outputs. handed: the
    gradients of ignored parameters. written: buffer -> the stage that updates it. follows_first:
    all ranks then take the values of the stage's first rank. trained: parameters that some stage
    has gradients for. shared: those among them that several ranks hold, with the positions of
    these. loss: the output that is differentiated, None if the caller computes the loss; `constant`
    are then the results that need no gradient. puts_off: gradients are summed on each rank, and
    reduced with the last micro-batch's.
    """

    position: int
    schedule: str
    taken: Mapping[str, tuple[Parcel, ...]]
    sent: Mapping[str, tuple[Parcel, ...]]
    results: tuple[Parcel, ...]
    handed: tuple[Parcel, ...]
    written: Mapping[str, int]
    follows_first: bool
    trained: tuple[str, ...]
    shared: Mapping[str, tuple[int, ...]]
    loss: int | None
    constant: frozenset[int]
    puts_off: bool
    digest: str


@dataclass
class _TrainingStep:
    """A training step under way: what it runs on, and what stands between its moves.

    results: the user's outputs of all micro-batches, as far as they are there. rest: the moves that
    are left, once these are handed out. grads: their gradients. handed: the sums of the gradients
    of ignored parameters, by leaf. writes: the number of writes to parameters before it. number: of
    the step, by which ranks agree whose backward runs.
    """

    micro_batches: Sequence[list[Any]]
    seeds: list[tuple[int, int]]
    number: int = 0
    results: dict[Parcel, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    handed: dict[int, Tensor] = field(default_factory=dict)
    rest: Iterator[None] | None = None
    writes: int = 0
    saved: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    waiting: dict[tuple[int, int], Iterator[Any]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    made: dict[tuple[Parcel, int], Tensor] = field(default_factory=dict)
    left: int = 0  # backwards that have not run

    @property
    def num(self) -> int:
        return len(self.micro_batches)


@dataclass
class _Made:
    """The gradients that a training step has made, until a backward hands them out.

    params: by name. handed: those of ignored parameters, in the order of `OwnStage.handed`.
    overflows: some rank has found an inf or NaN in what the loss scale had multiplied.
    """

    params: dict[str, Tensor]
    handed: list[Tensor]
    overflows: bool


Moves = Callable[["PipelineRun"], Iterator[None] | None]


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
        self._num_begun = 0
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
        ignored = [micro_batches[0][each.leaf] for each in self.part.handed]
        if self.part.loss is None:
            return list(_HalfTrained.apply(self, micro_batches, self._anchor.output, *ignored))
        return [_Trained.apply(self, micro_batches, self._anchor.output, *ignored)]

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
            found = []
            for result in self.part.results:
                made = None
                if result.source in outs:
                    made = outs[result.source][self._leaves[result.source][result.output]]
                found.append(self._share(result, made, result.shape))
            self._share_buffers()
        self._step = None
        self._engine.world.level()
        return found

    def _share(self, result: Parcel, made: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Give a result that one stage has made to all of them."""
        if made is not None:
            box = made.contiguous()
        else:
            box = torch.empty(shape, dtype=result.dtype, device=self._engine.world.device)
        source = result.source % self._axis.size
        self._axis.broadcast(_bytes(box), source, f"output {result.name}").wait()
        return box

    def _share_buffers(self) -> None:
        """Give the buffers that each stage has updated to all of them."""
        held, written = self.executable.buffers(), dict[int, list[Tensor]]()
        for name, position in self.part.written.items():
            written.setdefault(position, []).append(held[name])
        share_between_stages(self._engine.world, written, self.part.follows_first)

    def train(self, micro_batches: Sequence[list[Any]]) -> tuple[Tensor, _Made]:
        """Run a training step's forwards and backwards; return its loss and its gradients."""
        step = self._begun(micro_batches)
        moves = self._moves(step.num)
        made = self._with_gradients(step, lambda: moves(self))
        self._share_buffers()
        return self._mean(step.losses, step.num), made

    def train_forward(self, micro_batches: Sequence[list[Any]]) -> tuple[_TrainingStep, list[Any]]:
        """Run a training step's forwards; return the step, and the results of the whole batch."""
        step = self._step = self._begun(micro_batches)
        step.writes = self._engine.store.poll_writes()
        step.rest = self._moves(step.num)(self)
        assert step.rest is not None, "a step whose loss is outside waits for it"
        with self.executable.guard(micro_batches[0]), torch.no_grad():
            next(step.rest)
            self._finish_sending()
            found = []
            for result in self.part.results:
                shape = step.num * result.shape[0], *result.shape[1:]
                found.append(self._share(result, step.results.pop(result, None), shape))
            self._share_buffers()
        self._step = None
        self._engine.world.level()
        return step, found

    def train_backward(self, step: _TrainingStep, grads: Sequence[Tensor | None]) -> _Made:
        """Run its backwards, given the gradients of the results; return the parameters'."""
        what = f"backward of {self.executable.contract.label}"
        self._engine.world.agree(what, f"{self._digest};step={step.number}")
        if self._engine.store.poll_writes() != step.writes:
            raise GradientError(
                f"{self.executable.contract.label}: the parameters were changed (by an optimizer "
                "step, a load or an in-place write) between this forward and its backward, so its "
                "gradients would be wrong. Run backward before the change."
            )
        for result, grad in zip(self.part.results, grads, strict=True):
            if result.output not in self.part.constant and grad is not None:
                step.grads[result.output] = grad
        rest = step.rest
        assert rest is not None, "its forwards have run"

        def moves() -> None:
            for _ in rest:
                raise AssertionError("a step waits for the caller once.")

        return self._with_gradients(step, moves)

    def _begun(self, micro_batches: Sequence[list[Any]]) -> _TrainingStep:
        self._engine.store.grads.rest()
        num = len(micro_batches)
        seeds = [(self.executable.seed(), self.executable.seed()) for _ in range(num)]
        self._num_begun += 1
        left = num * len(self._stages)
        return _TrainingStep(micro_batches, seeds, self._num_begun, left=left)

    def _with_gradients(self, step: _TrainingStep, moves: Callable[[], object]) -> _Made:
        """Make moves that end a step; return the gradients of this rank's parameters."""
        engine, gradients = self._engine, self._engine.gradients
        names = [n for n in self.part.trained if n in engine.store.params]
        self._step = step
        with self.executable.guard(step.micro_batches[0]), torch.no_grad():
            with gradients.apart(names) as found, self._in_parts():
                moves()
                self._finish_sending()
            grads = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            self._add_shared(grads)
            handed = [self._handed(step, each) for each in self.part.handed]
            made = _Made(grads, handed, gradients.has_overflowed())
        self._step = None
        engine.world.level()
        return made

    @contextlib.contextmanager
    def _in_parts(self) -> Iterator[None]:
        """Let no backward inside look for overflows: other stages are not there yet."""
        self._engine.gradients.is_part = True
        try:
            yield
        finally:
            self._engine.gradients.is_part = False

    def _handed(self, step: _TrainingStep, parcel: Parcel) -> Tensor:
        """Return an ignored parameter's gradient on all ranks of the pipeline, unscaled."""
        total, scaler = step.handed.pop(parcel.leaf, None), self._engine.gradients.scaler
        if total is not None and scaler is not None:
            scaler.unscale(total.view(-1), total.view(-1))
        return self._share(parcel, total, parcel.shape)

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
        tangents, scaler = dict[int, Tensor](), self._engine.gradients.scaler
        if part.loss in executable.contract.tangents:
            shape, _, dtype = executable.contract.tangents[part.loss]
            tangents[part.loss] = torch.full(
                shape, 1.0 / step.num, dtype=dtype, device=self._engine.world.device
            )
        for result in part.results if part.loss is None else ():
            if result.source == stage and result.output in executable.contract.tangents:
                tangents[result.output] = self._piece(step, result, micro_batch)
        if scaler is not None:
            tangents = scaler.begin(tangents)  # what other stages send is scaled
        tangents |= self._take(step, part.taken[BACKWARD], micro_batch)
        return step.saved.pop((stage, micro_batch)), tangents, step.seeds[micro_batch][1]

    def _piece(self, step: _TrainingStep, result: Parcel, micro_batch: int) -> Tensor:
        """Return the gradient of a micro-batch's result; zeros if the loss does not read it."""
        whole = step.grads.get(result.output)
        if whole is None:
            return torch.zeros(result.shape, dtype=result.dtype, device=self._engine.world.device)
        rows = result.shape[0]
        return whole[micro_batch * rows : (micro_batch + 1) * rows]

    def _note_gradients(
        self, step: _TrainingStep, stage: int, micro_batch: int, grads: Sequence[Tensor]
    ) -> None:
        executable, part = self._stages[stage]
        made = dict(zip(executable.contract.input_grads, grads, strict=True))
        for crossing in part.sent[BACKWARD]:
            step.made[crossing, micro_batch] = made[crossing.output]
        for each in part.handed:
            if each.source == stage:
                self._sum_up(step, each.leaf, made[each.leaf])

    def _sum_up(self, step: _TrainingStep, leaf: int, grad: Tensor) -> None:
        """Add a micro-batch's gradient of an ignored parameter to those before."""
        if leaf in step.handed:
            step.handed[leaf].add_(grad)
        else:
            step.handed[leaf] = grad.clone(memory_format=torch.contiguous_format)

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
            for result in part.results if part.loss is None else ():
                if result.source == stage:
                    self._fill_in(step, result, micro_batch, outs[leaves[result.output]])
        return outs

    def _fill_in(self, step: _TrainingStep, result: Parcel, micro_batch: int, made: Tensor) -> None:
        """Copy a micro-batch's result to its place among those of the whole batch."""
        rows = result.shape[0]
        if result not in step.results:
            step.results[result] = made.new_empty((step.num * rows, *result.shape[1:]))
        step.results[result][micro_batch * rows : (micro_batch + 1) * rows] = made

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
        if self._engine.gradients.scaler is not None:
            self._engine.gradients.scaler.take_flag()  # of backwards that count for nothing


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as flat bytes, so that transfers need no dtype."""
    return tensor.view(-1).view(torch.uint8)


def _check_backward(run: PipelineRun, is_left: bool) -> None:
    """Raise if a backward cannot hand out the gradients of a step.

    is_left: the step has not handed them out before.
    """
    label = run.executable.contract.label
    if torch.is_grad_enabled():
        raise GradientError(
            f"{label}: create_graph=True needs gradients of gradients, which a compiled "
            f"backward does not have. {run._engine.double_backward()}"
        )
    if not is_left:
        raise GradientError(
            f"{label}: backward ran a second time, but a pipeline hands the gradients of a "
            "step out once. Call the model again, or add the losses and call backward once."
        )
    if not will_run(run._anchor.always):
        raise GradientError(
            f"{label}: a pipeline sets p.grad of all parameters, and was asked for some "
            "gradients alone (torch.autograd.grad, or backward(inputs=...)). Call "
            "loss.backward() and read p.grad."
        )


def _hand_out(run: PipelineRun, made: _Made, scale: Tensor) -> list[Tensor | None]:
    """Set p.grad, times `scale` []; return the gradients of ignored parameters likewise."""
    gradients = run._engine.gradients
    if not gradients.hand_out(run.part.trained, made.params, scale, made.overflows):
        return [None] * len(made.handed)
    return [grad * scale for grad in made.handed]


class _Trained(torch.autograd.Function):
    """A training step that has already run; its backward hands out the gradients."""

    @staticmethod
    def forward(
        ctx: Any, run: PipelineRun, micro_batches: Any, anchor: Tensor, *ignored: Tensor
    ) -> Tensor:
        try:
            loss, ctx.made = run.train(micro_batches)
        except BaseException:
            run.forget()
            raise
        ctx.run = run
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: PipelineRun = ctx.run
        _check_backward(run, ctx.made is not None)
        made, ctx.made = ctx.made, None
        return None, None, None, *_hand_out(run, made, grad)


class _HalfTrained(torch.autograd.Function):
    """A training step whose forwards have run; its backward runs the backwards."""

    @staticmethod
    def forward(
        ctx: Any, run: PipelineRun, micro_batches: Any, anchor: Tensor, *ignored: Tensor
    ) -> Any:
        try:
            ctx.step, found = run.train_forward(micro_batches)
        except BaseException:
            run.forget()
            raise
        ctx.run = run
        ctx.set_materialize_grads(False)
        pairs = zip(run.part.results, found, strict=True)
        ctx.mark_non_differentiable(*(v for r, v in pairs if r.output in run.part.constant))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        run: PipelineRun = ctx.run
        _check_backward(run, ctx.step is not None)
        step, ctx.step = ctx.step, None
        try:
            made = run.train_backward(step, grads)
        except BaseException:
            run.forget()
            raise
        return None, None, None, *_hand_out(run, made, torch.ones(()))
