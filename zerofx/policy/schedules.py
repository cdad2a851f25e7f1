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
        fitting = [n for n in range(1, PER_STAGE * size + 1) if batch % n == 0]
        return max(fitting, default=0)
    return int(asked) if batch and batch % int(asked) == 0 else 0
