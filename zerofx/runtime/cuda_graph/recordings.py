"""One recorded forward or backward: what goes in, the replay, and what comes out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from zerofx.runtime.cuda_graph.static_tensors import Results, fill

T = TypeVar("T")
BACKWARDS = 8  # recordings of the backwards of one recorded forward


class Saved(list[Tensor]):
    """What a replayed forward saved: it lies in the recording's own memory."""

    def __init__(self, values: Sequence[Tensor], recording: Forward) -> None:
        super().__init__(values)
        self.recording = recording


class Recordings(Generic[T]):
    """Recordings by state, the newest `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: dict[Hashable, T] = {}

    def get(self, state: Hashable) -> T | None:
        return self._made.get(state)

    def add(self, state: Hashable, recording: T) -> T:
        while len(self._made) >= self._limit:
            del self._made[next(iter(self._made))]
        self._made[state] = recording
        return recording


class Forward:
    """A recorded forward with its inputs, results and saved values, and the backwards of it.

    Saved values keep their memory through backward, which frees them as it goes when it runs
    without recording; inputs and results are held a second time.
    """

    def __init__(self, inputs: list[Any], lasting: Sequence[Tensor], recorded: Any) -> None:
        (outs, self.updates, self.saved), self._replay = recorded
        self._inputs = inputs
        self._outs = Results(outs, inputs, lasting)
        self.backwards: Recordings[Backward] = Recordings(BACKWARDS)

    def play(self, leaves: list[Any]) -> tuple[list[Tensor], list[Tensor], Saved]:
        fill(self._inputs, leaves)
        self._replay()
        return self._outs.give_out(leaves), self.updates, Saved(self.saved, self)


class Backward:
    """A recorded backward: its tangents, its results, and the gradients that it stores.

    targets: where it reduces to; held, so that the addresses stay what they are.
    """

    def __init__(
        self,
        tangents: dict[int, Tensor],
        recorded: Any,
        published: list[tuple[Any, ...]],
        targets: list[Tensor],
    ) -> None:
        grads, self._replay = recorded
        self._tangents, self._grads = tangents, Results(grads, [], [])
        self.published, self._targets = published, targets

    def play(self, tangents: dict[int, Tensor]) -> list[Any]:
        fill(self._tangents.values(), (tangents[leaf] for leaf in self._tangents))
        self._replay()
        return self._grads.give_out([])
