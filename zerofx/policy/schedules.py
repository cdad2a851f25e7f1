"""Schedules of a pipeline: in which order each rank runs the forwards and backwards of a batch.

A batch is cut into micro-batches. A stage runs a forward when its activations have come, and a
backward when its gradients have; what has run forward and not yet backward is under way there. With
`interleave` a rank has several stages: of P ranks the one at position p has stages p, P + p, ...

With "zero-bubble" a backward is in two parts. The first one computes the gradients of a stage's
inputs, for which another stage waits. The second one computes those of its weights, for which no
stage waits: it comes later, where the rank would be idle.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", for 1F1B and for the interleaved schedule; Qi et al.
2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), for its schedule ZB-H1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHTS = "backward_input", "backward_weights"  # the two parts of a backward
WHOLE, SPLIT = (FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHTS)  # what runs on each micro-batch
PER_STAGE = 4  # micro-batches that "auto" takes for each rank of a pipeline, at most


@dataclass(frozen=True)
class Action:
    """A forward, a backward or a part of one, run on one micro-batch.

    graph: one of `WHOLE`, or of `SPLIT`. turn: which of its rank's stages, from 0; the pipeline's
    stage is turn * ranks + position.
    """

    graph: str
    micro_batch: int
    turn: int = 0

    def __str__(self) -> str:
        which = f".{self.turn}" if self.turn else ""
        letter = "W" if self.graph == WEIGHTS else self.graph[0].upper()
        return f"{letter}{self.micro_batch}{which}"

    @property
    def reads(self) -> str:
        """The graph whose received values it reads, and whose values it sends; "" if none."""
        return _GRAPH_OF[self.graph]


_GRAPH_OF = {FORWARD: FORWARD, BACKWARD: BACKWARD, INPUT: BACKWARD, WEIGHTS: ""}


def halves(order: Iterable[Action]) -> tuple[str, ...]:
    """Return what an order runs on each micro-batch, one after the other."""
    return SPLIT if any(action.graph == INPUT for action in order) else WHOLE


def actions(
    schedule: str, size: int, position: int, micro_batches: int, interleave: int = 1
) -> tuple[Action, ...]:
    """Return what the rank at `position` of `size` runs in a training step, in order."""
    if schedule == "interleaved":
        return _interleaved(size, position, micro_batches, interleave)
    assert interleave == 1, f"{schedule} has one stage on each rank"
    forwards = [Action(FORWARD, i) for i in range(micro_batches)]
    backwards = [Action(BACKWARD, i) for i in range(micro_batches)]
    if schedule == "gpipe":
        return (*forwards, *backwards)
    assert schedule in ("1f1b", "zero-bubble"), schedule
    ahead = min(micro_batches, size - position - 1)  # so many that the last stage is never idle
    order = _one_by_one(forwards, backwards, ahead)
    return _split(order, position) if schedule == "zero-bubble" else order


def _split(order: Sequence[Action], behind: int) -> tuple[Action, ...]:
    """Return an order with its backwards in two parts, the second `behind` micro-batches later.

    A rank that is `behind` others runs so many fewer forwards ahead. Each rank therefore has as
    many micro-batches under way as the first, the rank that has most of them under 1F1B.
    """
    found: list[Action] = []
    for action in order:
        if action.graph == FORWARD:
            found.append(action)
            continue
        found.append(replace(action, graph=INPUT))
        if action.micro_batch >= behind:
            found.append(Action(WEIGHTS, action.micro_batch - behind))
    num = sum(action.graph == FORWARD for action in order)
    found += [Action(WEIGHTS, i) for i in range(max(0, num - behind), num)]
    return tuple(found)


def orders(
    schedule: str, size: int, micro_batches: int, interleave: int = 1
) -> list[tuple[Action, ...]]:
    """Return what each rank runs."""
    return [actions(schedule, size, rank, micro_batches, interleave) for rank in range(size)]


def _one_by_one(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """Return `ahead` forwards, then a forward and a backward by turns, then what is left."""
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])


def _interleaved(
    size: int, position: int, micro_batches: int, interleave: int
) -> tuple[Action, ...]:
    """Return Megatron-LM's order: `size` micro-batches through each of the rank's stages in turn.

    The number of micro-batches is a multiple of `size`.
    """
    assert micro_batches % size == 0, f"{micro_batches} micro-batches over {size} ranks"
    rounds = range(0, micro_batches, size)
    turns = range(interleave)
    forwards = [
        Action(FORWARD, first + i, turn) for first in rounds for turn in turns for i in range(size)
    ]
    backwards = [
        Action(BACKWARD, first + i, turn)
        for first in rounds
        for turn in reversed(turns)
        for i in range(size)
    ]
    ahead = min(len(forwards), 2 * (size - position - 1) + (interleave - 1) * size)
    return _one_by_one(forwards, backwards, ahead)


Others = tuple[int, int]  # micro-batches that have run forward only; that wait for WEIGHTS


def others_under_way(order: Iterable[Action]) -> Iterator[tuple[Action, dict[int, Others]]]:
    """Yield each action, with the other micro-batches under way meanwhile by turn."""
    now: dict[int, Others] = {}
    for action in order:
        saved, waiting = now.get(action.turn, (0, 0))
        if action.graph == WEIGHTS:
            waiting -= 1
        elif action.graph != FORWARD:
            saved -= 1
        now[action.turn] = saved, waiting
        yield action, dict(now)
        is_begun, waits = action.graph == FORWARD, action.graph == INPUT
        now[action.turn] = saved + is_begun, waiting + waits


@dataclass(frozen=True)
class Moment:
    """One action of a rank, with what is there of other micro-batches while it runs.

    others: turn -> its other micro-batches under way. ended: turn -> its backwards that have ended.
    is_last: it is the last action of its turn.
    """

    action: Action
    others: dict[int, Others]
    ended: dict[int, int]
    is_last: bool


def moments(order: Sequence[Action]) -> list[Moment]:
    """Return each action of an order with what is there meanwhile."""
    end, ended, found = halves(order)[-1], dict[int, int](), []
    last = {action.turn: i for i, action in enumerate(order)}
    for i, (action, others) in enumerate(others_under_way(order)):
        found.append(Moment(action, others, dict(ended), last[action.turn] == i))
        if action.graph == end:
            ended[action.turn] = ended.get(action.turn, 0) + 1
    return found


def overrun(order: Sequence[Action], counted: Sequence[Action], turn: int) -> tuple[int, str]:
    """Return the first action beside which more is under way than in a counted order, and what.

    More is under way if no action of the same half in the other order has as many micro-batches of
    both kinds beside it. Returns (-1, "") if there is none.
    """
    known: dict[str, set[Others]] = {}
    for action, now in others_under_way(counted):
        if action.turn == turn:
            known.setdefault(action.graph, set()).add(now[turn])
    for i, (action, now) in enumerate(others_under_way(order)):
        if action.turn != turn:
            continue
        saved, waiting = now[turn]
        if not any(saved <= a and waiting <= b for a, b in known.get(action.graph, ())):
            most = 1 + max(a + b for a, b in known[action.graph])
            said = f"{1 + saved + waiting} micro-batches would be under way there"
            if halves(counted) == SPLIT:
                said += f", {waiting} others of them waiting for gradients of weights"
            return i, f"{said}, and memory is counted for {most}"
    return -1, ""


def num_micro_batches(asked: str | int, batch: int, size: int, interleave: int = 1) -> int:
    """Return into how many pieces a batch is cut; 0 if it cannot be cut into as many as asked."""
    step = size if interleave > 1 else 1  # the interleaved order goes by `size` of them
    if asked == "auto":
        choices = range(step, PER_STAGE * size + 1, step)
        return max((n for n in choices if batch and batch % n == 0), default=0)
    return int(asked) if batch and batch % int(asked) == 0 else 0


def expected_micro_batches(asked: str | int, size: int) -> int:
    """Return the number of micro-batches to plan for before a batch is known."""
    return PER_STAGE * size if asked == "auto" else int(asked)


@dataclass(frozen=True)
class Hop:
    """A value that one stage sends another with each micro-batch: in forward, or in backward.

    name: tells the values apart that go the same way.
    """

    graph: str
    source: int
    target: int
    name: str = ""

    @property
    def ahead(self) -> int:
        """The number of its transfers that may be in flight before the sender waits for the first.

        A stage runs ahead of another by as many micro-batches as there are stages between them.
        """
        return 2 * abs(self.target - self.source)


# -- What a rank does, move by move: this is what runs ---------------------------------------------


@dataclass(frozen=True)
class PipelineMove:
    """One thing that a rank does in a training step.

    verb: one of `WHOLE` or `SPLIT` runs that half of `stage` on a micro-batch, as soon as what it
    reads has come; "receive" begins to receive a value for `stage`, "send" sends one of `stage`'s.
    hop: which value. reduces: the last half sends the sums of the stage's gradients on their way.
    """

    verb: str
    stage: int
    micro_batch: int
    hop: Hop | None = None
    reduces: bool = False

    @property
    def reads(self) -> str:
        """The graph whose received values it reads, if it runs a half; "" if none."""
        return _GRAPH_OF.get(self.verb, "")

    @property
    def is_of_backward(self) -> bool:
        """Whether it runs a backward or a part of one, or moves a value of one."""
        return (self.hop.graph if self.hop else self.verb) != FORWARD

    def __str__(self) -> str:
        if self.hop is None:
            return f"{self.verb} of micro-batch {self.micro_batch} in stage {self.stage}"
        where = f"from stage {self.hop.source} to stage {self.hop.target}"
        return f"{self.verb} of {self.hop.name} of micro-batch {self.micro_batch} {where}"


def moves(
    orders: Sequence[Sequence[Action]], hops: Sequence[Hop], puts_off: bool = True
) -> list[tuple[PipelineMove, ...]]:
    """Return what each rank does.

    It begins to receive what an action reads together with the action before it. What one rank
    sends another arrives in the order in which it is sent, whatever it is for: so receives begin in
    that order too. Between stages of one rank nothing is sent.

    orders: of each rank. puts_off: gradients are summed, and reduced by a stage's last backward.
    """
    size = len(orders)
    sent = [list(_sends(order, hops, size, rank)) for rank, order in enumerate(orders)]
    found = []
    for rank, order in enumerate(orders):
        coming = {
            source: [m for m in sent[source] if m[0].target % size == rank]
            for source in range(size)
            if source != rank
        }
        found.append(tuple(_moves_of(rank, size, order, hops, coming, puts_off)))
    return found


def forwards_first(done: Iterable[PipelineMove]) -> tuple[PipelineMove, ...]:
    """Return moves in the same order, but with all of backward after all of forward."""
    return tuple(sorted(done, key=lambda move: move.is_of_backward))


def _sends(
    order: Sequence[Action], hops: Sequence[Hop], size: int, rank: int
) -> Iterator[tuple[Hop, int]]:
    for action in order:
        stage = action.turn * size + rank
        for hop in hops:
            if hop.graph == action.reads and hop.source == stage and hop.target % size != rank:
                yield hop, action.micro_batch


def _moves_of(
    rank: int, size: int, order: Sequence[Action], hops: Sequence[Hop],
    coming: dict[int, list[tuple[Hop, int]]], puts_off: bool,
) -> Iterator[PipelineMove]:  # fmt: skip
    begun = dict.fromkeys(coming, 0)
    ends = halves(order)[-1]
    last = {a.turn: i for i, a in enumerate(order) if a.graph == ends}
    for i, action in enumerate(order):
        for each in order[i : i + 2]:
            stage = each.turn * size + rank
            for source, values in coming.items():
                needed = [
                    k + 1
                    for k, (hop, micro_batch) in enumerate(values)
                    if (hop.graph, hop.target, micro_batch) == (each.reads, stage, each.micro_batch)
                ]
                upto = max(needed, default=0)
                for hop, micro_batch in values[begun[source] : upto]:
                    yield PipelineMove("receive", hop.target, micro_batch, hop)
                begun[source] = max(begun[source], upto)
        stage = action.turn * size + rank
        reduces = action.graph == ends and (not puts_off or last[action.turn] == i)
        yield PipelineMove(action.graph, stage, action.micro_batch, reduces=reduces)
        for hop in hops:
            if hop.graph == action.reads and hop.source == stage and hop.target % size != rank:
                yield PipelineMove("send", stage, action.micro_batch, hop)


@dataclass
class _Conduct:
    """What one rank has done so far of a training step, and what is wrong with its next move.

    halves: what runs on each micro-batch, one after the other. puts_off: gradients are summed, and
    a stage's last backward reduces them. ran: (half, stage, micro-batch). begun, sent: what is
    received and sent. reduced: stages whose gradients are.
    """

    rank: int
    size: int
    hops: Sequence[Hop]
    halves: tuple[str, ...]
    puts_off: bool
    ran: set[tuple[str, int, int]] = field(default_factory=set)
    begun: set[tuple[Hop, int]] = field(default_factory=set)
    sent: set[tuple[Hop, int]] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)

    def fault(self, move: PipelineMove) -> str:
        """Return what is wrong with a move, an empty text if nothing is; it is made then."""
        if move.hop is None:
            return self._run(move)
        book = self.begun if move.verb == "receive" else self.sent
        if (move.hop, move.micro_batch) in book:
            return "it comes twice"
        if move.verb == "send" and not self._has_made(move.hop, move.micro_batch):
            return f"it comes before the {move.hop.graph} that makes it"
        book.add((move.hop, move.micro_batch))
        return ""

    def _run(self, move: PipelineMove) -> str:
        stage, number = move.stage, move.micro_batch
        if move.verb not in self.halves:
            return f"the schedule has {', '.join(self.halves)}"
        if (move.verb, stage, number) in self.ran:
            return "it runs twice"
        at, is_last = self.halves.index(move.verb), move.verb == self.halves[-1]
        if at and (self.halves[at - 1], stage, number) not in self.ran:
            return f"its {self.halves[at - 1]} has not run"
        if is_last and self.puts_off and stage in self.reduced:
            return f"the gradients of stage {stage} are reduced already"
        if is_last and not (self.puts_off or move.reduces):
            return "gradients are not summed here, so that each backward reduces them"
        for hop in self.hops:
            if (hop.graph, hop.target) == (move.reads, stage) and not self._has(hop, number):
                return (
                    f"it reads {hop.name} from stage {hop.source}, which has not been begun to be "
                    "received"
                )
        self.ran.add((move.verb, stage, number))
        if move.reduces:
            self.reduced.add(stage)
        return ""

    def _has(self, hop: Hop, micro_batch: int) -> bool:
        if hop.source % self.size == self.rank:
            return self._has_made(hop, micro_batch)
        return (hop, micro_batch) in self.begun

    def _has_made(self, hop: Hop, micro_batch: int) -> bool:
        half = next(half for half in self.halves if _GRAPH_OF[half] == hop.graph)
        return (half, hop.source, micro_batch) in self.ran

    def missing(self, stage: int, micro_batches: int) -> str:
        """Return what a stage has not done at the end of the step."""
        sends = [
            hop for hop in self.hops if hop.source == stage and hop.target % self.size != self.rank
        ]
        for number in range(micro_batches):
            for half in self.halves:
                if (half, stage, number) not in self.ran:
                    return f"{PipelineMove(half, stage, number)} is missing"
            for hop in sends:
                if (hop, number) not in self.sent:
                    return f"{PipelineMove('send', stage, number, hop)} is missing"
        return "" if stage in self.reduced else f"no backward of stage {stage} reduces gradients"


def fault_of(
    rank: int, size: int, done: Sequence[PipelineMove], hops: Sequence[Hop], stages: Sequence[int],
    micro_batches: int, puts_off: bool = True, halves: tuple[str, ...] = WHOLE,
) -> str:  # fmt: skip
    """Return what is wrong with one rank's moves by themselves, an empty text if nothing is."""
    conduct = _Conduct(rank, size, hops, halves, puts_off)
    for move in done:
        if move.stage not in stages:
            return f"{move}: this rank has stages {', '.join(map(str, stages))}"
        if move.micro_batch not in range(micro_batches):
            return f"{move}: there are {micro_batches} micro-batches, counted from 0"
        if fault := conduct.fault(move):
            return f"{move}: {fault}"
    left = (conduct.missing(stage, micro_batches) for stage in stages)
    return next(filter(None, left), "")


Travelling = dict[tuple[int, int], list[tuple[Hop, int]]]  # from rank to rank, in order


def stuck(done: Sequence[Sequence[PipelineMove]]) -> list[PipelineMove | None]:
    """Run the moves of all ranks on paper; return where each is stuck, nothing if all end.

    What one rank sends another is taken in the order in which the other begins to receive. A rank
    waits for what an action reads, and sends a value only while fewer than `Hop.ahead` of the same
    kind wait for a receiver that has not begun to receive them.
    """
    size = len(done)
    at = [0] * size
    sent: Travelling = {}
    begun: Travelling = {}
    received = {m.hop for mine in done for m in mine if m.verb == "receive" and m.hop is not None}

    def way_of(hop: Hop) -> tuple[int, int]:
        return hop.source % size, hop.target % size

    def has_come(hop: Hop, micro_batch: int) -> bool:
        posted = begun.get(way_of(hop), [])
        wanted = hop, micro_batch
        return wanted in posted and posted.index(wanted) < len(sent.get(way_of(hop), []))

    def can_run(move: PipelineMove) -> bool:
        if move.hop is None:
            reads = [h for h in received if (h.graph, h.target) == (move.reads, move.stage)]
            return all(has_come(hop, move.micro_batch) for hop in reads)
        if move.verb == "receive":
            return True
        way = way_of(move.hop)
        early = sent.get(way, [])[len(begun.get(way, [])) :]
        return sum(hop == move.hop for hop, _ in early) < move.hop.ahead

    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(done):
            while at[rank] < len(mine) and can_run(mine[at[rank]]):
                move = mine[at[rank]]
                if move.hop is not None:
                    book = sent if move.verb == "send" else begun
                    book.setdefault(way_of(move.hop), []).append((move.hop, move.micro_batch))
                at[rank] += 1
                moved = True
    if all(i == len(mine) for i, mine in zip(at, done, strict=True)):
        return []
    return [mine[i] if i < len(mine) else None for i, mine in zip(at, done, strict=True)]


def mismatch(done: Sequence[Sequence[PipelineMove]]) -> str:
    """Return which rank receives something else than the other sends, an empty text if none."""
    size = len(done)
    for source in range(size):
        for target in range(size):
            sends = [
                m for m in done[source]
                if m.verb == "send" and m.hop and m.hop.target % size == target
            ]  # fmt: skip
            takes = [
                m for m in done[target]
                if m.verb == "receive" and m.hop and m.hop.source % size == source
            ]  # fmt: skip
            for i in range(max(len(sends), len(takes))):
                a, b = (each[i] if i < len(each) else None for each in (sends, takes))
                if a is None or b is None or (a.hop, a.micro_batch) != (b.hop, b.micro_batch):
                    return (
                        f"rank {target} of the pipeline would {b or 'receive nothing'}, number "
                        f"{i + 1} from rank {source}, which would {a or 'send nothing'}"
                    )
    return ""
