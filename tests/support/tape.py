"""A recorder without a GPU: what a function does to memory, op by op, done again at each replay.

It is as unforgiving as a CUDA graph. A replay runs the recorded ops on the recorded memory and no
line of the host's Python. Recording itself leaves no effect: memory is put back, results are NaN
until the first replay. Memory that was there before is known by its address alone, and must still
lie there. What a recording made and nobody holds is gone, since its pool lends it to others; and
as an earlier recording works in memory that a later one may have got, its replay spoils all that
later ones keep. Reading a value on the host is refused, as by CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
ON_HOST = (aten._local_scalar_dense.default, aten.item.default, aten.equal.default)
NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Memory:
    """One storage, known without keeping it alive."""

    def __init__(self, storage: torch.UntypedStorage, is_own: bool) -> None:
        self.weak, self.is_own = StorageWeakRef(storage), is_own
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()

    def find(self) -> torch.UntypedStorage | None:
        if self.weak.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)

    def whole(self) -> Tensor:
        """Return all bytes of it. Not to be kept: whoever counts references would see it."""
        return torch.empty(0, dtype=torch.uint8).set_(self.find())

    def spoil(self) -> None:
        """Fill with the bytes of NaN what somebody still holds."""
        if (storage := self.find()) is not None and storage.nbytes():
            ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


@dataclass(frozen=True)
class Place:
    """Where an argument or a result of a recorded op lies."""

    memory: Memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Recording(TorchDispatchMode):
    """One recorded function: the ops that ran while this mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[Place]]] = []
        self.memories: dict[int, Memory] = {}
        self._alive: list[torch.UntypedStorage] = []  # until the recording ends
        self._before: dict[Memory, Tensor] = {}  # what was written to -> its bytes

    # -- recording --------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ON_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in given:
            self._memory(tensor, is_own=False)
        writes = func._schema.is_mutable
        if writes:
            self._remember(func, args, kwargs)
        placed = tree_map_only(Tensor, self._place, (args, kwargs))
        results = func(*args, **kwargs)
        made = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        theirs = {t.untyped_storage()._cdata for t in given}
        is_view = all(t.untyped_storage()._cdata in theirs for t in made)
        for tensor in made:
            self._memory(tensor, is_own=True)
        if writes or not (is_view or func._schema.name.split("::")[1] in NOTHING):
            places = [] if writes else [self._place(t) for t in made]
            self.ops.append((func, *placed, places))
        return results

    def _memory(self, tensor: Tensor, is_own: bool) -> Memory:
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            memory = self.memories[storage._cdata] = Memory(storage, is_own)
            if is_own:
                self._alive.append(storage)
        return memory

    def _place(self, tensor: Tensor) -> Place:
        memory = self.memories[tensor.untyped_storage()._cdata]
        shape, strides = tuple(tensor.shape), tensor.stride()
        return Place(memory, tensor.dtype, shape, strides, tensor.storage_offset())

    def _remember(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep the bytes of what is about to be written, if it is not the recording's own."""
        named = zip(func._schema.arguments, args, strict=False)
        pairs = [*named, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]
        for argument, value in pairs:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(value):
                known = self.memories[tensor.untyped_storage()._cdata]
                if not known.is_own and known not in self._before:
                    self._before[known] = known.whole().clone()

    def end(self) -> None:
        """Undo what was written, and let go of all that the function's results do not hold."""
        for memory, bytes_before in self._before.items():
            memory.whole().copy_(bytes_before)
        self._before.clear()
        self._alive.clear()
        self.spoil()

    # -- replay -----------------------------------------------------------------------------
    def spoil(self) -> None:
        for memory in self.own():
            memory.spoil()

    def own(self) -> Iterator[Memory]:
        return (m for m in self.memories.values() if m.is_own)

    def run(self) -> None:
        """Run every op again, in the same memory."""
        scratch: dict[int, torch.UntypedStorage] = {}

        def tensor(place: Place) -> Tensor:
            memory = place.memory
            storage = memory.find()
            if storage is None:
                storage = scratch.get(id(memory))
            if storage is None:
                assert memory.is_own, "a replay reads memory that is gone since it was recorded"
                storage = scratch[id(memory)] = torch.UntypedStorage(memory.nbytes)
                storage.fill_(0xFF)
            if not memory.is_own:
                now = storage.data_ptr(), storage.nbytes()
                assert now == (memory.address, memory.nbytes), "memory has moved since"
            empty = torch.empty(0, dtype=place.dtype)
            return empty.set_(storage, place.offset, place.shape, place.strides)

        with torch.no_grad():
            for func, args, kwargs, places in self.ops:
                given = tree_map_only(Place, tensor, (args, kwargs))
                results = func(*given[0], **given[1])
                made = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
                for place, result in zip(places, made, strict=bool(places)):
                    if result.numel():
                        tensor(place).copy_(result)


class Tape:
    """Records functions as a CudaRecorder does, and counts what it is asked for."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.warmed = self.replayed = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many functions were warmed up, recorded, and replayed."""
        return self.warmed, len(self.recordings), self.replayed

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.warmed += 1
        return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        recording, number = Recording(), len(self.recordings)
        generator = torch.get_rng_state()
        with recording:
            result = function()
        recording.end()
        torch.set_rng_state(generator)
        self.recordings.append(recording)

        def replay() -> None:
            self.replayed += 1
            for later in self.recordings[number + 1 :]:
                later.spoil()
            recording.run()

        return result, replay
