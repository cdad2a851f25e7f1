"""Recorded programs: whole forwards and backwards, recorded once and replayed in the same memory.

A replay launches the recorded kernels on the recorded addresses and runs nothing on the host. So
the host part of a call is done outside the replay. Everything that decides where a call reads and
writes forms its state. Each state is recorded separately, the second time that it occurs (the first
run warms up). Calls for which a replay would be wrong run without recording.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zerofx.compat.tensors import storage_identity
from zerofx.errors import CaptureError, ZerofxError, as_sentence
from zerofx.process import paused_collector
from zerofx.runtime.cuda_graph.recorder import Recorder
from zerofx.runtime.engine import Engine
from zerofx.runtime.step import Contract
from zerofx.runtime.tensors.tensor import local_of

# -- Tensors at fixed addresses: filled before each replay, read and copied out after it -- --------


def blank_like(value: Any) -> Any:
    """Return a new tensor with the same shape, strides and dtype; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False):  # the tensor outlives the mode of its first use
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def fill(places: Iterable[Any], values: Iterable[Any]) -> None:
    """Copy tensors into those that `blank_like` created for them."""
    for place, value in zip(places, values, strict=True):
        if isinstance(place, Tensor):
            _each_cell_once(place).copy_(_each_cell_once(value.detach()))


def _each_cell_once(tensor: Tensor) -> Tensor:
    """Return a view in which no two elements share memory, unlike those of an expanded tensor."""
    if tensor.numel() == 0:
        return tensor
    reach = 0
    is_repeated = False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            is_repeated |= stride <= reach
            reach += stride * (size - 1)
    return tensor.as_strided((reach + 1,), (1,)) if is_repeated else tensor


class Results:
    """The results of a recording, returned in memory that no later replay writes to.

    A result in an input's memory becomes the same view of the caller's own input. A result in
    `lasting` memory (parameters, buffers) stays there. All others are copied; results that share
    memory still share it in the copy.
    """

    def __init__(self, results: Sequence[Any], inputs: Sequence[Any], lasting: Sequence[Tensor]):
        self._results, self._inputs = list(results), list(inputs)
        homes = {storage_identity(t): i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
        kept = {storage_identity(t) for t in lasting}
        # Positions of a result and of the input it views.
        self._of_inputs: list[tuple[int, int]] = []
        self._lasting: list[int] = []
        groups: dict[tuple[int, torch.dtype], list[int]] = {}
        for position, result in enumerate(results):
            if not isinstance(result, Tensor):
                continue
            storage = storage_identity(result)
            home = homes.get(storage)
            if home is not None and inputs[home].dtype is result.dtype:
                self._of_inputs.append((position, home))
            elif storage in kept:
                self._lasting.append(position)
            else:
                groups.setdefault((storage, result.dtype), []).append(position)
        self._groups = list(groups.values())

    def give_out(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results for a caller who passed these inputs."""
        given = list(self._results)
        for position, home in self._of_inputs:
            given[position] = self._view_of(inputs[home], self._inputs[home], given[position])
        for position in self._lasting:
            given[position] = given[position].detach()
        for positions in self._groups:
            together = [given[p] for p in positions]
            for position, copy in zip(positions, _copies(together), strict=True):
                given[position] = copy
        return given

    @staticmethod
    def _view_of(theirs: Tensor, mine: Tensor, result: Tensor) -> Tensor:
        if result is mine:
            return theirs
        offset = theirs.storage_offset() + result.storage_offset() - mine.storage_offset()
        return theirs.as_strided(result.shape, result.stride(), offset)


def _copies(together: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors that share one storage, preserving their relative offsets."""
    start = min(t.storage_offset() for t in together)
    stop = max(t.storage_offset() + _extent(t) for t in together)
    flat = together[0].as_strided((stop - start,), (1,), start).clone()
    return [flat.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in together]


def _extent(tensor: Tensor) -> int:
    """Return how many elements of its storage a tensor spans."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


# -- One recorded forward or backward: its inputs, the replay, and its results ---- ----------------


T = TypeVar("T")
BACKWARDS = 8  # maximum number of recorded backwards per recorded forward


class Saved(list[Tensor]):
    """The saved values of a replayed forward, which are in the recording's own memory."""

    def __init__(self, values: Sequence[Tensor], recording: Forward) -> None:
        super().__init__(values)
        self.recording = recording


class Recordings(Generic[T]):
    """Recordings by state; only the newest `limit` are kept."""

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
    """A recorded forward with its inputs, results and saved values, and its recorded backwards.

    Saved values keep their memory through backward, which would free them along the way without
    recording. Inputs and results are held a second time.
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

    targets: the destinations of its reductions, held so that their addresses stay the same.
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


# -- Whole forwards and backwards, recorded once and then replayed in the same memory --------------


log = logging.getLogger("zerofx")
FORWARDS = 2  # recordings per forward; each keeps its own activations
SEEN = 32


class Room:
    """State shared by the recordings of one model: the recorder and the one pending forward.

    In the shared pool, memory that one recording keeps may be working memory of an earlier one.
    Only saved values are needed beyond a call. So while a replayed forward waits for its backward,
    other forwards run without recording.
    """

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self.engine, self.recorder = engine, recorder
        self._pending: Callable[[], Saved | None] = lambda: None
        engine.keep_memory()

    @property
    def is_pending(self) -> bool:
        return self._pending() is not None

    def note_pending(self, saved: Saved) -> None:
        self._pending = weakref.ref(saved)


class Recorded:
    """A program's emitted functions: called directly at first, and replayed once recorded.

    refreshed, stored: the buckets that forward refreshes and that backward stores gradients of.
    """

    def __init__(
        self,
        room: Room,
        contract: Contract,
        functions: tuple[Callable, Callable | None],
        refreshed: Sequence[int],
        stored: Sequence[int],
    ) -> None:
        self._room, self._contract = room, contract
        self._forward, self._backward = functions
        self._refreshed, self._stored = refreshed, stored
        self._moves = -1
        self._forwards: Recordings[Forward] = Recordings(FORWARDS)
        self._seen: dict[Hashable, None] = {}
        self._has_warned = False

    def _is_new(self, *state: Hashable) -> bool:
        """Record a state; return whether it is new (or was last seen too long ago)."""
        if state in self._seen:
            return False
        while len(self._seen) >= SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[state] = None
        return True

    # -- forward ----------------------------------------------------------------------------
    def forward(
        self, engine: Engine, shards: list[Tensor], buffers: dict[str, Tensor], leaves: list[Any]
    ) -> Any:
        """Run the emitted forward, or replay it."""

        def run() -> Any:
            return self._forward(engine, shards, buffers, leaves)

        if self._room.is_pending or not self._is_on_device(leaves, buffers):
            return run()
        if self._moves != engine.slots.moves:  # the recordings work in memory that is gone
            self._forwards, self._moves = Recordings(FORWARDS), engine.slots.moves
        # Done first, so that fresh and stale buckets need no separate recordings.
        for bucket in self._refreshed:
            engine.wait(engine.refresh(shards[bucket], bucket))
        state = tuple(b.data_ptr() for b in buffers.values())
        recording = self._forwards.get(state)
        if recording is None:
            if self._is_new("forward", self._moves, state):
                return self._room.recorder.warm_up(run)
            recording = self._forwards.add(state, self._record_forward(buffers, leaves))
        played = recording.play(leaves)
        if self._contract.is_training:
            self._room.note_pending(played[2])
        return played

    def _record_forward(self, buffers: dict[str, Tensor], leaves: list[Any]) -> Forward:
        engine = self._room.engine
        shards = engine.store.shards
        inputs = [blank_like(leaf) for leaf in leaves]
        fill(inputs, leaves)
        recorded = self._capture(
            "forward", lambda: self._forward(engine, shards, buffers, list(inputs))
        )
        return Forward(inputs, [*shards, *buffers.values()], recorded)

    def _is_on_device(self, leaves: list[Any], buffers: dict[str, Tensor]) -> bool:
        """Return whether kernels read all of these: a host tensor's value would be baked in."""
        device = self._room.engine.world.device.type
        for value in (*leaves, *buffers.values()):
            if isinstance(value, Tensor) and value.device.type != device:
                if not self._has_warned:
                    log.warning(
                        "%s runs without a CUDA graph. An input or buffer of shape %s is on %s, "
                        "not on %s.",
                        self._contract.label, list(value.shape), value.device, device,
                    )  # fmt: skip
                self._has_warned = True
                return False
        return True

    def _capture(self, what: str, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        try:
            with paused_collector():  # freeing another graph during capture would spoil this one
                return self._room.recorder.capture(function)
        except ZerofxError:
            raise
        except RuntimeError as e:
            raise CaptureError(
                f"{self._contract.label}: its {what} cannot become a CUDA graph: "
                f"{as_sentence(e)} Use Plan(cuda_graph=False)."
            ) from e

    # -- backward ---------------------------------------------------------------------------
    def backward(
        self, engine: Engine, shards: list[Tensor], saved: list[Tensor], tangents: dict[int, Tensor]
    ) -> Any:
        """Run the emitted backward, or replay it if its forward was a replay."""
        assert self._backward is not None
        function = self._backward
        state, targets = self._gradient_state()
        is_new = self._is_new("backward", engine.slots.moves, state)
        recording = None
        if isinstance(saved, Saved) and self._moves == engine.slots.moves:
            recording = saved.recording
        played = recording.backwards.get(state) if recording is not None else None
        if played is None and (is_new or recording is None):
            run = self._room.recorder.warm_up if is_new else _call
            return run(lambda: function(engine, shards, saved, tangents))
        if played is None:
            assert recording is not None
            made = self._record_backward(recording, tangents, targets)
            assert self._gradient_state()[0] == state, "a gradient moved while it was recorded"
            played = recording.backwards.add(state, made)
        grads = played.play(tangents)
        for call in played.published:
            engine.gradients.publish(*call)
        return grads

    def _record_backward(
        self, forward: Forward, tangents: dict[int, Tensor], targets: list[Tensor]
    ) -> Backward:
        engine, function = self._room.engine, self._backward
        assert function is not None
        places = {leaf: blank_like(tangent) for leaf, tangent in tangents.items()}
        fill(places.values(), tangents.values())
        published: list[tuple[Any, ...]] = []
        gradients, publish = engine.gradients, engine.gradients.publish
        gradients.publish = lambda *call: published.append(call)
        try:
            recorded = self._capture(
                "backward",
                lambda: function(engine, engine.store.shards, list(forward.saved), dict(places)),
            )
        finally:
            gradients.publish = publish
        return Backward(places, recorded, published, targets)

    def _gradient_state(self) -> tuple[Hashable, list[Tensor]]:
        """Return the state that decides where and how backward stores gradients, and their memory.

        This call moves a gradient that the user still holds out of the way, as backward itself
        would.
        """
        engine = self._room.engine
        if engine.gradients.discards:
            return None, []
        state: list[Hashable] = [engine.gradients.asked]
        targets = []
        for bucket in self._stored:
            target, accumulate = engine.store.grads.target(bucket)
            params = [engine.store.params[p.owner] for p in engine.layout.buckets[bucket].params]
            # For parameters without a gradient, backward zeroes the range before it adds. A
            # gradient elsewhere is copied into its range.
            places = tuple(_place(p.grad) for p in params) if accumulate else ()
            state.append((target.data_ptr(), accumulate, places))
            targets.append(target)
        return tuple(state), targets


def _place(grad: Tensor | None) -> int:
    if grad is None:
        return 0
    return local_of(grad).data_ptr()


def _call(function: Callable[[], T]) -> T:
    return function()
