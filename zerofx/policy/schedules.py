"""Schedules of a pipeline: in which order each stage runs the forwards and backwards of a batch.

A batch is cut into micro-batches. A stage runs a forward when its activations have come, and a
backward when its gradients have; what has run forward and not yet backward is under way there.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", for 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
PER_STAGE = 4  # micro-batches that "auto" takes a pipeline stage, at most


@dataclass(frozen=True)
class Action:
    """One half of a stage's program, run on one micro-batch."""

    graph: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.graph[0].upper()}{self.micro_batch}"


def actions(schedule: str, size: int, position: int, micro_batches: int) -> tuple[Action, ...]:
    """Return what the stage at `position` of `size` runs in a training step, in order."""
    forwards = [Action(FORWARD, i) for i in range(micro_batches)]
    backwards = [Action(BACKWARD, i) for i in range(micro_batches)]
    if schedule == "gpipe":
        return (*forwards, *backwards)
    assert schedule == "1f1b", schedule
    ahead = min(micro_batches, size - position - 1)  # so many that the last stage is never idle
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return (*forwards[:ahead], *steady, *backwards[micro_batches - ahead :])


def most_under_way(order: Sequence[Action]) -> int:
    """Return how many micro-batches are under way at a time at most."""
    now = most = 0
    for action in order:
        now += 1 if action.graph == FORWARD else -1
        most = max(most, now)
    return most


def num_micro_batches(asked: str | int, batch: int, size: int) -> int:
    """Return into how many pieces a batch is cut; 0 if it cannot be cut into as many as asked."""
    if asked == "auto":
        fitting = [n for n in range(1, PER_STAGE * size + 1) if batch and batch % n == 0]
        return max(fitting, default=0)
    return int(asked) if batch and batch % int(asked) == 0 else 0


def expected_micro_batches(asked: str | int, size: int) -> int:
    """Return how many to plan for before a batch is known."""
    return PER_STAGE * size if asked == "auto" else int(asked)


@dataclass(frozen=True)
class Hop:
    """What one stage sends another with each micro-batch: in forward, or in backward."""

    graph: str
    source: int
    target: int

    @property
    def ahead(self) -> int:
        """How many of its transfers may be under way before the sender waits for the first.

        A stage runs ahead of another by as many micro-batches as stages lie between them.
        """
        return 2 * abs(self.target - self.source)


def stuck(orders: Sequence[Sequence[Action]], links: Sequence[Hop]) -> list[Action | None]:
    """Run the orders of all stages on paper; return where each is stuck, nothing if all end.

    A stage waits for what an action reads, and sends a value only while fewer than `Hop.ahead` of
    the same link wait for a receiver that has not begun to receive them. A stage begins to receive
    for an action together with the action before it.
    """
    at = [0] * len(orders)
    sent = dict.fromkeys(links, 0)  # micro-batches that the source has sent

    def begun(link: Hop) -> int:
        """Return for how many micro-batches the target has begun to receive."""
        reached = orders[link.target][: at[link.target] + 2]
        return sum(action.graph == link.graph for action in reached)

    def can_run(stage: int, action: Action) -> bool:
        mine = [link for link in links if link.graph == action.graph]
        has_come = all(sent[k] > action.micro_batch for k in mine if k.target == stage)
        may_send = all(sent[k] - begun(k) < k.ahead for k in mine if k.source == stage)
        return has_come and may_send

    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order) and can_run(stage, order[at[stage]]):
                action = order[at[stage]]
                for link in links:
                    if link.graph == action.graph and link.source == stage:
                        sent[link] += 1
                at[stage] += 1
                moved = True
    if all(i == len(order) for i, order in zip(at, orders, strict=True)):
        return []
    return [order[i] if i < len(order) else None for i, order in zip(at, orders, strict=True)]
