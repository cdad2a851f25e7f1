"""The oracle over pipelines: what the ranks of a pipeline compute by their texts of moves.

Each position is given the text of its pipeline.py and the programs of its stages; the data ranks
there run them in lock step, each on its own samples. Moves run on real
values, one micro-batch at a time, and it shares no code with the verifier or the runtime. What one
rank sends another arrives in the order in which it was sent, whatever it is for, and is taken in
the order in which the other begins to receive. A send waits for its receiver as soon as as many
transfers of that value are under way as stages lie between both, times two.

A step is wrong if it hangs, reads what has not come, keeps more micro-batches under way in a stage
than it should, reduces a stage's gradients other than once, or if any result differs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import State, lock_step, mean_gradients
from oracle_exchange import Delivery, Exchange
from oracle_memory import OracleError
from oracle_rank import Rank
from torch import Tensor

from zerofx.ir.meta import Role
from zerofx.ir.program import BACKWARD, FORWARD, Planned, Wire

Blocking = Generator[None, None, None]
_Key = tuple[str, int, int]  # a value, from stage to stage


@dataclass
class PipelineOutcome:
    """What a step leaves: losses by micro-batch and data rank, gradients by position, how it went.

    under_way: stage -> the most micro-batches that its forward had run and its backward had not.
    reductions: stage -> how often its gradients were reduced.
    """

    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    under_way: Counter[int] = field(default_factory=Counter)
    reductions: Counter[int] = field(default_factory=Counter)


class _Calls:
    """Collects what a text calls, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def receive(self, name: str, micro_batch: int, source: int, target: int) -> None:
        given = {"name": name, "micro_batch": micro_batch, "source": source, "target": target}
        self.made.append(("receive", given))

    def send(self, name: str, micro_batch: int, source: int, target: int) -> None:
        given = {"name": name, "micro_batch": micro_batch, "source": source, "target": target}
        self.made.append(("send", given))

    def forward(self, stage: int, micro_batch: int) -> None:
        self.made.append(("forward", {"stage": stage, "micro_batch": micro_batch}))

    def backward(self, stage: int, micro_batch: int, reduces: bool = False) -> None:
        given = {"stage": stage, "micro_batch": micro_batch, "reduces": reduces}
        self.made.append(("backward", given))


@dataclass
class _Link:
    """From one rank to another: values in the order sent, boxes in the order begun."""

    sent: list[list[Tensor]] = field(default_factory=list)  # each of all data ranks
    begun: int = 0

    def has_come(self, number: int) -> bool:
        return number < len(self.sent)

    def is_taken(self, number: int) -> bool:
        return number < self.begun


class _PipelineRank:
    """The ranks at one position: run its moves, as a generator that yields where they must wait."""

    def __init__(
        self, position: int, programs: Mapping[int, Planned], text: str, links: Any, state: State
    ) -> None:
        self.position, self.programs, self.links, self.state = position, programs, links, state
        self.size = programs[position].plan.parallel.pipeline
        self.data = programs[position].layout.mesh.along("shard")
        calls, found = _Calls(), dict[str, Any]()
        exec(compile(text, f"rank {position}", "exec"), found)
        found["step"](calls)
        self.num, self.calls = found["MICRO_BATCHES"], calls.made
        self.wires: dict[_Key, Wire] = {
            (w.name, w.source, w.target): w for p in programs.values() for w in p.stage.wires
        }
        self.made: dict[tuple[_Key, int], list[Tensor]] = {}
        self.coming: dict[tuple[_Key, int], tuple[_Link, int, Wire]] = {}
        self.flying: dict[_Key, deque[tuple[_Link, int]]] = {}
        self.live: dict[tuple[int, int], list[Rank]] = {}
        self.sums: dict[int, dict[str, Tensor]] = {stage: {} for stage in programs}
        self.handed: dict[str, Tensor] = {}
        self.out = PipelineOutcome()

    def step(self) -> Blocking:
        for verb, given in self.calls:
            yield from getattr(self, f"_{verb}")(**given)
        for flying in self.flying.values():
            for link, number in flying:
                while not link.is_taken(number):
                    yield
        if self.live:
            raise OracleError(f"rank {self.position} ends with {sorted(self.live)} under way")

    # -- moves --------------------------------------------------------------------------------
    def _receive(self, name: str, micro_batch: int, source: int, target: int) -> Blocking:
        yield from ()
        wire = self.wires[name, source, target]
        if target not in self.programs:
            raise OracleError(f"rank {self.position} has no stage {target}")
        link = self.links[source % self.size, self.position]
        self.coming[(name, source, target), micro_batch] = link, link.begun, wire
        link.begun += 1

    def _send(self, name: str, micro_batch: int, source: int, target: int) -> Blocking:
        key = name, source, target
        flying = self.flying.setdefault(key, deque())
        while len(flying) >= 2 * abs(target - source):
            link, number = flying.popleft()
            while not link.is_taken(number):
                yield
        link = self.links[self.position, target % self.size]
        flying.append((link, len(link.sent)))
        link.sent.append(self.made.pop((key, micro_batch)))

    def _forward(self, stage: int, micro_batch: int) -> Blocking:
        program = self.programs[stage]
        taken = yield from self._take(program, FORWARD, micro_batch)
        own = self.state.inputs[micro_batch * self.data : (micro_batch + 1) * self.data]
        inputs = [{**a, **b} for a, b in zip(own, taken, strict=True)]
        none = [{}] * self.data
        state = State(self.state.params, self.state.buffers, inputs, none, [0] * self.data)
        exchange = Exchange(self.data, Delivery.LATE)
        ranks = [Rank(r, program, state, exchange) for r in range(self.data)]
        if (stage, micro_batch) in self.live:
            raise OracleError(f"stage {stage} has micro-batch {micro_batch} under way already")
        self.live[stage, micro_batch] = ranks
        now = sum(s == stage for s, _ in self.live)
        self.out.under_way[stage] = max(self.out.under_way[stage], now)
        self._run(ranks, FORWARD)
        outputs = [_results(rank, Role.OUTPUT) for rank in ranks]
        self._keep(program, FORWARD, micro_batch, outputs)
        loss = program.calling.loss
        if loss in outputs[0]:
            self.out.losses[micro_batch] = [each[loss] for each in outputs]

    def _backward(self, stage: int, micro_batch: int, reduces: bool) -> Blocking:
        program = self.programs[stage]
        tangents = yield from self._take(program, BACKWARD, micro_batch)
        ranks = self.live.pop((stage, micro_batch))
        loss = program.calling.loss
        for rank, given in zip(ranks, tangents, strict=True):
            outputs = _results(rank, Role.OUTPUT)
            if loss in outputs:
                given[loss] = torch.full_like(outputs[loss], 1.0 / self.num)
            rank.tangents, rank.results = given, []
        self._run(ranks, BACKWARD)
        grads = [_results(rank, Role.INPUT_GRAD) for rank in ranks]
        self._keep(program, BACKWARD, micro_batch, grads)
        sums = self.sums[stage]
        for name, value in mean_gradients(ranks).items():
            sums[name] = value if name not in sums else sums[name] + value
        if reduces:
            self.out.reductions[stage] += 1
            for name, value in sums.items():
                before = self.handed.get(name)
                self.handed[name] = value if before is None else before + value
            self.sums[stage] = {}

    # -- values -------------------------------------------------------------------------------
    def _keep(
        self, program: Planned, graph: str, micro_batch: int, outputs: list[dict[int, Tensor]]
    ) -> None:
        for wire in program.stage.sent(graph):
            key = wire.name, wire.source, wire.target
            self.made[key, micro_batch] = [each[wire.output].clone() for each in outputs]

    def _take(
        self, program: Planned, graph: str, micro_batch: int
    ) -> Generator[None, None, list[dict[int, Tensor]]]:
        found: list[dict[int, Tensor]] = [{} for _ in range(self.data)]
        for wire in program.stage.taken(graph):
            key = wire.name, wire.source, wire.target
            if wire.source in self.programs:
                boxes = self.made.pop((key, micro_batch))
            else:
                link, number, expected = self.coming.pop((key, micro_batch))
                while not link.has_come(number):
                    yield
                boxes, due = link.sent[number], expected.value
                if any((b.numel(), b.dtype) != (due.numel(), due.dtype) for b in boxes):
                    raise OracleError(f"{wire.name} arrives as {list(boxes[0].shape)}")
            like = wire.value
            for place, box in enumerate(boxes):
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                found[place][wire.leaf] = made.copy_(box.reshape(like.shape))
        return found

    @staticmethod
    def _run(ranks: list[Rank], name: str) -> None:
        """Run one graph on the data ranks of a position."""
        exchange = ranks[0].ops.exchange
        lock_step([_call(rank, name) for rank in ranks], exchange)


def _call(rank: Rank, name: str) -> Blocking:
    values = yield from rank._call(rank.program.graphs[name])
    rank._finish_call(list(zip(rank.program.outputs[name], values, strict=True)))


def _results(rank: Rank, role: Role) -> dict[int, Tensor]:
    return {spec.index: v for spec, v in rank.results if spec.role is role}


def run_pipeline(
    programs: Sequence[Planned], texts: Sequence[str], state: State
) -> PipelineOutcome:
    """Run a training step; texts are of all ranks, state.inputs of all micro-batches.

    Raises:
        OracleError: it hangs, or breaks what a move demands.
        Exception: whatever Python or an operator raises on what it was given.
    """
    size = len(texts)
    links = {(a, b): _Link() for a in range(size) for b in range(size)}
    ranks = [
        _PipelineRank(p, dict(list(enumerate(programs))[p::size]), text, links, state)
        for p, text in enumerate(texts)
    ]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _by_turns([rank.step() for rank in ranks], links)
    out = PipelineOutcome()
    for link in links.values():
        if link.begun != len(link.sent):
            raise OracleError(f"{len(link.sent)} values are sent, and {link.begun} received")
    for rank in ranks:
        out.losses |= rank.out.losses
        out.under_way |= rank.out.under_way
        out.reductions += rank.out.reductions
        out.gradients.append(dict(rank.handed))
    _share(programs, out.gradients)
    return out


def _by_turns(steps: list[Blocking], links: Mapping[Any, _Link]) -> None:
    running = dict(enumerate(steps))
    while running:
        before = _progress(running, links)
        for rank, step in list(running.items()):
            try:
                next(step)
            except StopIteration:
                del running[rank]
        if _progress(running, links) == before:
            raise OracleError(f"deadlock: ranks {sorted(running)} wait for each other")


def _progress(running: Mapping[int, object], links: Mapping[Any, _Link]) -> tuple[int, int, int]:
    sent = sum(len(link.sent) for link in links.values())
    return len(running), sent, sum(link.begun for link in links.values())


def _share(programs: Sequence[Planned], gradients: list[dict[str, Tensor]]) -> None:
    """Sum the gradients of parameters that several ranks hold: of the ranks that a layout names."""
    size = len(gradients)
    done = {}
    for rank in range(size):
        for bucket in programs[rank].layout.buckets:
            if len(bucket.positions) < 2 or rank not in bucket.positions:
                continue
            for param in bucket.params:
                parts = [gradients[p].get(param.name) for p in bucket.positions]
                found = [part for part in parts if part is not None]
                if found:
                    done[rank, param.name] = sum(found[1:], found[0])
    for (rank, name), total in done.items():
        gradients[rank][name] = total
