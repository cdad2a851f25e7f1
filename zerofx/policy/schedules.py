"""Schedules of a pipeline: in which order each rank runs the forwards and backwards of a batch.

A batch is cut into micro-batches. A stage runs a forward when its activations have come, and a
backward when its gradients have; what has run forward and not yet backward is under way there. With
`interleave` a rank has several stages: of P ranks the one at position p has stages p, P + p, ...

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", for 1F1B and for the interleaved schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
PER_STAGE = 4  # micro-batches that "auto" takes for each rank of a pipeline, at most


@dataclass(frozen=True)
class Action:
    """One half of a stage's program, run on one micro-batch.

    turn: which of its rank's stages, from 0; the pipeline's stage is turn * ranks + position.
    """

    graph: str
    micro_batch: int
    turn: int = 0

    def __str__(self) -> str:
        which = f".{self.turn}" if self.turn else ""
        return f"{self.graph[0].upper()}{self.micro_batch}{which}"


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
    assert schedule == "1f1b", schedule
    ahead = min(micro_batches, size - position - 1)  # so many that the last stage is never idle
    return _one_by_one(forwards, backwards, ahead)


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


def under_way(order: Sequence[Action]) -> Iterator[dict[int, int]]:
    """Yield, after each action, how many micro-batches are under way in each of a rank's stages."""
    now: dict[int, int] = {}
    for action in order:
        now[action.turn] = now.get(action.turn, 0) + (1 if action.graph == FORWARD else -1)
        yield dict(now)


def most_under_way(order: Sequence[Action], turn: int | None = None) -> int:
    """Return how many micro-batches are under way at a time at most: in one stage, or in all."""
    counts = under_way(order)
    return max((sum(now.values()) if turn is None else now.get(turn, 0) for now in counts), default=0)


def num_micro_batches(asked: str | int, batch: int, size: int, interleave: int = 1) -> int:
    """Return into how many pieces a batch is cut; 0 if it cannot be cut into as many as asked."""
    step = size if interleave > 1 else 1  # the interleaved order goes by `size` of them
    if asked == "auto":
        choices = range(step, PER_STAGE * size + 1, step)
        return max((n for n in choices if batch and batch % n == 0), default=0)
    return int(asked) if batch and batch % int(asked) == 0 else 0


def expected_micro_batches(asked: str | int, size: int) -> int:
    """Return how many to plan for before a batch is known."""
    return PER_STAGE * size if asked == "auto" else int(asked)


@dataclass(frozen=True)
class Hop:
    """A value that one stage sends another with each micro-batch: in forward, or in backward.

    number: tells the values apart that go the same way.
    """

    graph: str
    source: int
    target: int
    number: int = 0

    @property
    def ahead(self) -> int:
        """How many of its transfers may be under way before the sender waits for the first.

        A stage runs ahead of another by as many micro-batches as stages lie between them.
        """
        return 2 * abs(self.target - self.source)


# -- What a rank does, move by move: this is what runs ---------------------------------------------


@dataclass(frozen=True)
class Move:
    """One thing that a rank does in a training step.

    verb: "forward" or "backward" runs that half of `stage` on a micro-batch, as soon as what it
    reads has come; "receive" begins to receive a value for `stage`, "send" sends one of `stage`'s.
    hop: which value. reduces: the backward sends the sums of the stage's gradients on their way.
    """

    verb: str
    stage: int
    micro_batch: int
    hop: Hop | None = None
    reduces: bool = False

    def __str__(self) -> str:
        if self.hop is None:
            return f"{self.verb} of micro-batch {self.micro_batch} in stage {self.stage}"
        to = f"to stage {self.hop.target}" if self.verb == "send" else f"from {self.hop.source}"
        what = f"value {self.hop.number} of micro-batch {self.micro_batch} in {self.hop.graph}"
        return f"{self.verb} {to}: {what}"


def moves(
    orders: Sequence[Sequence[Action]], hops: Sequence[Hop], puts_off: bool = True
) -> list[tuple[Move, ...]]:
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


def _sends(
    order: Sequence[Action], hops: Sequence[Hop], size: int, rank: int
) -> Iterator[tuple[Hop, int]]:
    for action in order:
        stage = action.turn * size + rank
        for hop in hops:
            if hop.graph == action.graph and hop.source == stage and hop.target % size != rank:
                yield hop, action.micro_batch


def _moves_of(
    rank: int, size: int, order: Sequence[Action], hops: Sequence[Hop],
    coming: dict[int, list[tuple[Hop, int]]], puts_off: bool,
) -> Iterator[Move]:  # fmt: skip
    begun = dict.fromkeys(coming, 0)
    last = {a.turn: i for i, a in enumerate(order) if a.graph == BACKWARD}
    for i, action in enumerate(order):
        for each in order[i : i + 2]:
            stage = each.turn * size + rank
            for source, values in coming.items():
                needed = [
                    k + 1
                    for k, (hop, micro_batch) in enumerate(values)
                    if (hop.graph, hop.target, micro_batch) == (each.graph, stage, each.micro_batch)
                ]
                upto = max(needed, default=0)
                for hop, micro_batch in values[begun[source] : upto]:
                    yield Move("receive", hop.target, micro_batch, hop)
                begun[source] = max(begun[source], upto)
        stage = action.turn * size + rank
        reduces = action.graph == BACKWARD and (not puts_off or last[action.turn] == i)
        yield Move(action.graph, stage, action.micro_batch, reduces=reduces)
        for hop in hops:
            if hop.graph == action.graph and hop.source == stage and hop.target % size != rank:
                yield Move("send", stage, action.micro_batch, hop)


def fault_of(
    rank: int, size: int, done: Sequence[Move], hops: Sequence[Hop], stages: Sequence[int],
    micro_batches: int, puts_off: bool = True,
) -> str:  # fmt: skip
    """Return what is wrong with one rank's moves by themselves, an empty text if nothing is."""
    seen: set[tuple[str, int, int]] = set()
    begun: set[tuple[Hop, int]] = set()
    sent: set[tuple[Hop, int]] = set()
    reduced: set[int] = set()
    for move in done:
        stage, number = move.stage, move.micro_batch
        if stage not in stages:
            return f"{move}: this rank has stages {', '.join(map(str, stages))}"
        if number not in range(micro_batches):
            return f"{move}: there are {micro_batches} micro-batches, counted from 0"
        if move.hop is not None and move.hop not in hops:
            return f"{move}: there is no such value"
        if move.verb == "receive":
            assert move.hop is not None
            if (move.hop, number) in begun:
                return f"{move}: it is received twice"
            begun.add((move.hop, number))
        elif move.verb == "send":
            assert move.hop is not None
            if (move.hop.graph, stage, number) not in seen:
                return f"{move}: it is sent before the {move.hop.graph} that makes it"
            if (move.hop, number) in sent:
                return f"{move}: it is sent twice"
            sent.add((move.hop, number))
        else:
            if (move.verb, stage, number) in seen:
                return f"{move}: it runs twice"
            if move.verb == BACKWARD and (FORWARD, stage, number) not in seen:
                return f"{move}: its forward has not run"
            if stage in reduced and puts_off:
                return f"{move}: the gradients of stage {stage} are reduced already"
            for hop in hops:
                if (hop.graph, hop.target) != (move.verb, stage):
                    continue
                is_there = (hop, number) in begun
                if hop.source % size == rank:
                    is_there = (hop.graph, hop.source, number) in seen
                if not is_there:
                    return f"{move}: it reads value {hop.number} from stage {hop.source}, which " \
                           "this rank has not begun to receive"
            seen.add((move.verb, stage, number))
            if move.reduces:
                reduced.add(stage)
            elif move.verb == BACKWARD and not puts_off:
                return f"{move}: gradients are not summed here, and each backward reduces them"
    for stage in stages:
        for number in range(micro_batches):
            for graph in (FORWARD, BACKWARD):
                if (graph, stage, number) not in seen:
                    return f"{Move(graph, stage, number)} is missing"
            for hop in hops:
                if hop.source == stage and hop.target % size != rank and (hop, number) not in sent:
                    return f"{Move('send', stage, number, hop)} is missing"
        if stage not in reduced:
            return f"no backward of stage {stage} reduces its gradients"
    return ""


def stuck(done: Sequence[Sequence[Move]]) -> list[Move | None]:
    """Run the moves of all ranks on paper; return where each is stuck, nothing if all end.

    What one rank sends another is taken in the order in which the other begins to receive. A rank
    waits for what an action reads, and sends a value only while fewer than `Hop.ahead` of the same
    kind wait for a receiver that has not begun to receive them.
    """
    size = len(done)
    at = [0] * size
    sent: dict[tuple[int, int], list[tuple[Hop, int]]] = {}  # from rank to rank
    begun: dict[tuple[int, int], list[tuple[Hop, int]]] = {}
    reads = {m.hop for moves_ in done for m in moves_ if m.verb == "receive" and m.hop is not None}

    def can_run(rank: int, move: Move) -> bool:
        if move.verb == "receive":
            return True
        if move.verb == "send":
            assert move.hop is not None
            way = rank, move.hop.target % size
            early = sent.get(way, [])[len(begun.get(way, [])) :]
            return sum(hop == move.hop for hop, _ in early) < move.hop.ahead
        for hop in reads:
            if (hop.graph, hop.target) == (move.verb, move.stage):
                way = hop.source % size, rank
                if (hop, move.micro_batch) not in begun.get(way, []):
                    return False
                place = begun[way].index((hop, move.micro_batch))
                if len(sent.get(way, [])) <= place:
                    return False
        return True

    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(done):
            while at[rank] < len(mine) and can_run(rank, mine[at[rank]]):
                move = mine[at[rank]]
                if move.hop is not None:
                    is_send = move.verb == "send"
                    peer = (move.hop.target if is_send else move.hop.source) % size
                    way, book = ((rank, peer), sent) if is_send else ((peer, rank), begun)
                    book.setdefault(way, []).append((move.hop, move.micro_batch))
                at[rank] += 1
                moved = True
    if all(i == len(mine) for i, mine in zip(at, done, strict=True)):
        return []
    return [mine[i] if i < len(mine) else None for i, mine in zip(at, done, strict=True)]


def mismatch(done: Sequence[Sequence[Move]]) -> str:
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
