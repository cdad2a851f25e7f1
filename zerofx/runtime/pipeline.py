"""Pipeline run: this rank's pipeline stage runs each micro-batch, with sends and receives between.

A training call runs the whole schedule, forwards and backwards, and returns the mean of the
micro-batches' losses on every rank. `loss.backward()` then hands out its gradients.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.comm.collectives import Axis, Work
from zerofx.compat.autograd import will_run
from zerofx.errors import GradientError
from zerofx.policy.schedules import BACKWARD, FORWARD, Action, Hop, actions
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
    """What a rank knows of the pipeline: its own stage, all that crosses, and who has the results.

    taken, sent: what this stage's graphs receive and send. results: the user's outputs.
    trained: parameters that some stage has gradients for. shared: those among them that several
    stages hold, with the positions of these. loss: the output that is differentiated. puts_off:
    gradients are summed on each rank, and reduced with the last micro-batch's.
    """

    position: int
    schedule: str
    size: int
    taken: Mapping[str, tuple[Parcel, ...]]
    sent: Mapping[str, tuple[Parcel, ...]]
    results: tuple[Parcel, ...]
    trained: tuple[str, ...]
    shared: Mapping[str, tuple[int, ...]]
    loss: int | None
    puts_off: bool
    digest: str


class PipelineRun:
    """Runs the calls of one program of a pipeline on this rank."""

    def __init__(self, executable: Executable, part: OwnStage) -> None:
        self.executable, self.part = executable, part
        self._engine = executable.engine
        self._axis: Axis = self._engine.world.axis("pipeline")
        self._leaves = {leaf: i for i, leaf in enumerate(executable.contract.outputs)}
        self._anchor = self._engine.gradients.anchor()
        self._sending: dict[str, deque[tuple[Work, Tensor]]] = {}
        self._receiving: dict[Action, list[tuple[Parcel, Tensor, Work]]] = {}
        digest = hashlib.sha256(part.digest.encode()).hexdigest()[:12]
        self._digest = f"pipeline={part.schedule}:{digest}"

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
        run, is_ready = self.executable, 1
        if run.is_auto:
            is_ready = int(run.form().endswith("=ready"))
        mine = " ".join(map(str, [is_ready, self.part.position, *self._engine.stale()]))
        choices = world.agree_but_for(what, f"{self._digest};{state}", f"again={mine}")
        said = [[*map(int, choice.partition("=")[2].split())] for choice in choices]
        if run.swap is not None and all(ready for ready, *_ in said):
            run.compiled()
        run.calls += 1
        self._gather_again(rest for _, *rest in said)
        self.executable.compare_inputs(micro_batches)
        if not contract.is_training:
            return self._infer(micro_batches[0])
        return [_Trained.apply(self, micro_batches, self._anchor.output)]

    def _gather_again(self, said: Iterable[list[int]]) -> None:
        """Gather again the resident buckets that are stale on any rank of this stage."""
        for position, *buckets in said:
            if position == self.part.position:
                self._engine.forget(buckets)

    # -- the two kinds of calls -----------------------------------------------------------------
    def _infer(self, leaves: list[Any]) -> list[Tensor]:
        seed = self.executable.seed()
        with self.executable.guard(leaves), torch.no_grad():
            first = Action(FORWARD, 0)
            self._post(first)
            outs, _ = self._forward(first, leaves, seed)
            self._finish_sending()
            found = [self._share(result, outs) for result in self.part.results]
        self._engine.world.level()
        return found

    def _share(self, result: Parcel, outs: Sequence[Tensor]) -> Tensor:
        """Send a result from the stage that has it to all stages."""
        if result.source == self.part.position:
            made = outs[self._leaves[result.output]]
            box = made.contiguous()
        else:
            box = torch.empty(result.shape, dtype=result.dtype, device=self._engine.world.device)
        self._axis.broadcast(_bytes(box), result.source, f"output {result.name}").wait()
        return box

    def train(self, micro_batches: Sequence[list[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run a training step's forwards and backwards; return its loss and its gradients."""
        engine, part, num = self._engine, self.part, len(micro_batches)
        order = actions(part.schedule, part.size, part.position, num)
        engine.store.grads.rest()
        seeds = [(self.executable.seed(), self.executable.seed()) for _ in range(num)]
        saved: dict[int, list[Tensor]] = {}
        losses: dict[int, Tensor] = {}
        names = [n for n in part.trained if n in engine.store.params]
        with self.executable.guard(micro_batches[0]), torch.no_grad():
            with engine.gradients.apart(names) as found:
                for action, following in zip(order, [*order[1:], None], strict=True):
                    number = action.micro_batch
                    self._post(action)
                    if following is not None:  # receive it while this action runs
                        self._post(following)
                    if action.graph == FORWARD:
                        outs, saved[number] = self._forward(
                            action, micro_batches[number], seeds[number][0]
                        )
                        if part.loss in self._leaves:
                            losses[number] = outs[self._leaves[part.loss]]
                    else:
                        is_last = number == num - 1
                        engine.gradients.no_sync = part.puts_off and not is_last
                        try:
                            self._backward(action, saved.pop(number), seeds[number][1], num)
                        finally:
                            engine.gradients.no_sync = False
                self._finish_sending()
            grads = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            self._add_shared(grads)
            loss = self._mean(losses, num)
        engine.world.level()
        return loss, grads

    def _forward(
        self, action: Action, leaves: list[Any], seed: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        received = self._take(action)
        given = [*leaves, *(received[c.leaf] for c in self.part.taken[FORWARD])]
        outs, saved = self.executable.run_part_forward(given, seed)
        for crossing in self.part.sent[FORWARD]:
            self._send(crossing, outs[self._leaves[crossing.output]], action)
        return outs, saved

    def _backward(self, action: Action, saved: list[Tensor], seed: int, num: int) -> None:
        tangents = self._take(action)
        contract = self.executable.contract
        if self.part.loss in contract.tangents:
            shape, _, dtype = contract.tangents[self.part.loss]
            tangents[self.part.loss] = torch.full(
                shape, 1.0 / num, dtype=dtype, device=self._engine.world.device
            )
        is_last = action.micro_batch == num - 1
        grads = self.executable.run_part_backward(saved, tangents, seed, is_last)
        made = dict(zip(contract.input_grads, grads, strict=True))
        for crossing in self.part.sent[BACKWARD]:
            self._send(crossing, made[crossing.output], action)

    def _mean(self, losses: Mapping[int, Tensor], num: int) -> Tensor:
        """Return on every rank the mean of the micro-batches' losses, which one stage has."""
        [result] = self.part.results
        if losses:
            mean = torch.stack([losses[i] for i in range(num)]).mean(0).contiguous()
        else:
            mean = torch.empty(result.shape, dtype=result.dtype, device=self._engine.world.device)
        self._axis.broadcast(_bytes(mean), result.source, "mean loss").wait()
        return mean

    def _add_shared(self, grads: dict[str, Tensor]) -> None:
        """Sum the gradients of parameters that several stages hold, in stage order."""
        for name, positions in self.part.shared.items():
            if self.part.position not in positions:
                continue
            piece = self._engine.store.pieces[name]
            mine = grads.get(name)
            if mine is None:
                local = self._engine.store.local_view(name)
                mine = grads[name] = piece.show(torch.zeros_like(local))
            flat = piece.local(mine)
            others = [p for p in positions if p != self.part.position]
            parts = {self.part.position: flat.clone()} | {p: torch.empty_like(flat) for p in others}
            label = f"gradient of {name}, which pipeline stages share"
            if flat.numel():
                works = [self._axis.receive(parts[p], p, label) for p in others]
                works += [self._axis.send(parts[self.part.position], p, label) for p in others]
                for work in works:
                    work.wait()
            flat.copy_(parts[positions[0]])
            for position in positions[1:]:
                flat.add_(parts[position])

    # -- transfers --------------------------------------------------------------------------------
    def _post(self, action: Action) -> None:
        """Start receiving the values that an action reads."""
        if action in self._receiving:
            return
        device, posted = self._engine.world.device, []
        for crossing in self.part.taken[action.graph]:
            box = torch.empty(crossing.shape, dtype=crossing.dtype, device=device)
            label = f"{crossing.name} of micro-batch {action.micro_batch} from pipeline stage"
            work = self._axis.receive(_bytes(box), crossing.source, f"{label} {crossing.source}")
            posted.append((crossing, box, work))
        self._receiving[action] = posted

    def _take(self, action: Action) -> dict[int, Tensor]:
        """Wait for the values that an action reads, and return them by leaf."""
        found: dict[int, Tensor] = {}
        for crossing, box, work in self._receiving.pop(action):
            work.wait()
            if box.stride() != crossing.strides:
                made = torch.empty_strided(
                    crossing.shape, crossing.strides, dtype=box.dtype, device=box.device
                )
                box = made.copy_(box)
            found[crossing.leaf] = box
        return found

    def _send(self, crossing: Parcel, made: Tensor, action: Action) -> None:
        key = f"{crossing.graph} {crossing.name} {crossing.target}"
        under_way = self._sending.setdefault(key, deque())
        if len(under_way) >= Hop(crossing.graph, crossing.source, crossing.target).ahead:
            under_way.popleft()[0].wait()
        box = made.contiguous()
        label = f"{crossing.name} of micro-batch {action.micro_batch} to pipeline stage"
        work = self._axis.send(_bytes(box), crossing.target, f"{label} {crossing.target}")
        under_way.append((work, box))

    def _finish_sending(self) -> None:
        for under_way in self._sending.values():
            while under_way:
                under_way.popleft()[0].wait()

    def forget(self) -> None:
        """Drop the transfers that were in flight when a call failed."""
        self._sending.clear()
        self._receiving.clear()


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
                "backward does not have; use the uncompiled model for double backward"
            )
        if ctx.grads is None:
            raise GradientError(
                f"{label}: backward ran a second time, but a pipeline hands the gradients of a "
                "step out once; call the model again"
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
