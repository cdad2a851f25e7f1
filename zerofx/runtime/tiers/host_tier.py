"""Host tier: memory for values between forward and backward, and the copies to and from it.

Host memory is a pool separate from the device's allocator, on CPU-only machines too. A place is
borrowed by one call's value for as long as that call holds it, and is then reused. Places are
created on first need and kept.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zerofx.nvme.request import Request
from zerofx.policy.borrowing import FreeBuffers
from zerofx.runtime.tiers.beside import Beside

# -- Host memory outside torch's allocator: pinned, or pages of its own ----------------------------


HUGE_BYTES = 8 << 20  # from this size on, rounding up to huge pages wastes little


class Place:
    """A range of host memory, and the last copy from it or to it."""

    __slots__ = ("event", "memory")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory, _ = host_memory(nbytes, device)
        self.event: Any = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


def host_memory(nbytes: int, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """Return zeroed bytes of host memory that copies from and to a device can use.

    Also return the map that contains them, or None if they are pinned. The memory bypasses torch's
    allocator, as pinned memory does on CUDA, so that the allocator counts only the device's memory.
    """
    with torch.inference_mode(False):  # the memory outlives the mode of its first use
        if device.type == "cuda":
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True), None
        held = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a hint: fewer page faults, and fewer pages for disks to pin
                held.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes], held


# -- Lanes of copies between device and host: one stream each on CUDA, inline on CPU ---------------


Mark = Callable[[], None]


class Lane(Protocol):
    """Runs copies one after another, concurrently with the compute."""

    def copy(self, out: Tensor, source: Tensor, behind: Any, mark: Mark | None = None) -> Any:
        """Launch a copy after the compute launched so far, and after an event of a lane.

        mark: called when the lane reaches the start and the end of the copy.

        Returns:
            The argument for `join`, or None if the copy has already ended.
        """

    def join(self, event: Any) -> None:
        """Make compute launched from now on wait for a copy. The host does not wait."""

    def settle(self, event: Any) -> None:
        """Make the host wait for a copy whose memory it is about to read or overwrite."""


class InlineLane:
    """Copies synchronously at the launch.

    A copy thread would compete with the compute for cores and memory bandwidth. It would gain
    nothing, and the time of a copy would no longer show up at its launch.
    """

    def copy(self, out: Tensor, source: Tensor, behind: Any, mark: Mark | None = None) -> None:
        if mark:
            mark()
        with torch.no_grad():
            out.copy_(source)
        if mark:
            mark()

    def join(self, event: Any) -> None:
        pass

    def settle(self, event: Any) -> None:
        pass


class StreamLane:
    """Copies on a stream of its own, ordered by events only.

    The memory of neither side is reused before its copy has ended, although the allocator does not
    know this stream. The schedule holds the source until `join`, which orders the compute stream
    after the copy. The destination was last used by work that the copy waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, out: Tensor, source: Tensor, behind: Any, mark: Mark | None = None) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if behind is not None:
            self._stream.wait_event(behind)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if mark:
                mark()
            out.copy_(source, non_blocking=True)
            if mark:
                mark()
            return self._stream.record_event()

    def join(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def settle(self, event: Any) -> None:
        event.synchronize()


def lanes_for(device: torch.device) -> tuple[Lane, Lane]:
    """Return the lanes to the host and back from it."""
    if device.type == "cuda":
        return StreamLane(device), StreamLane(device)
    return InlineLane(), InlineLane()


D2H, H2D = "d2h", "h2d"
NVME_READ, NVME_WRITE = "nvme_read", "nvme_write"  # separate lanes, between disk and host


# -- The host tier: memory for values between forward and backward, and the copies to and from it --


@dataclass
class Moved:
    """Bytes copied in one direction."""

    calls: int = 0
    nbytes: int = 0


class Copy:
    """A copy in flight: `tensor`, its destination, may be read only after `wait`.

    lane: D2H or H2D.
    event: the event that the lane waits for, or None if the copy has already ended.
    """

    __slots__ = ("_source", "_tier", "event", "lane", "tensor")

    def __init__(
        self, tier: HostTier, tensor: Tensor, source: Tensor, lane: str, event: Any
    ) -> None:
        self.tensor: Tensor | None = tensor
        self._tier, self.lane, self.event = tier, lane, event
        self._source: Tensor | None = source

    def wait(self) -> Tensor:
        """Order later compute after the copy, release its source, and return the destination."""
        tensor, source = self.tensor, self._source
        assert tensor is not None and source is not None, "the copy was already waited for"
        self._tier.finish(self, source)
        # the schedule's variable for this copy outlives it
        self.tensor = self._source = None
        return tensor


class HostTier:
    """The host memory of one model on one rank, and its two lanes of copies.

    poison: fill memory that is given back with NaN, so that a read before its reload does not go
        unnoticed.
    moved: lane -> the copies on it so far.
    beside: the recorder of each transfer, while one records.
    """

    def __init__(
        self, device: torch.device, poison: bool = False, lanes: tuple[Lane, Lane] | None = None
    ) -> None:
        self.device, self.poison = device, poison
        self.moved = {lane: Moved() for lane in (D2H, H2D, NVME_READ, NVME_WRITE)}
        self.beside: Beside | None = None
        self._lanes = lanes
        self._free: FreeBuffers[Place] = FreeBuffers()
        self._lent: dict[int, tuple[Place, weakref.ref]] = {}  # by address
        self._under_way: dict[Copy, None] = {}
        self._lock = threading.RLock()  # updates in backward borrow from a separate thread

    @property
    def nbytes(self) -> int:
        """The size of all places in bytes, borrowed or free."""
        with self._lock:
            return self._free.size + sum(p.nbytes for p, _ in self._lent.values())

    @property
    def num_lent(self) -> int:
        """The number of values currently on the host."""
        return len(self._lent)

    # -- what a schedule calls --------------------------------------------------------------
    def offload(self, x: Tensor) -> Copy:
        """Launch the copy of a whole storage to the host; `x` is held until its wait."""
        return self.move(self.borrow(x, x.dtype), x, D2H)

    def borrow_flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory of `numel` elements, which the host may fill at once."""
        _, flat = self.borrow_within(numel * dtype.itemsize, 0, numel, dtype)
        return flat

    def borrow_within(
        self, nbytes: int, start: int, numel: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return (host memory as bytes, `numel` elements of it starting at byte `start`).

        The host may fill both at once. They are borrowed until the elements are dropped.
        """
        form = torch.empty(numel, dtype=dtype, device="meta")
        place = self._take(nbytes)
        if place.event is not None:  # a copy from it to the device may be in flight
            self._lane(H2D).settle(place.event)
        return place.memory[:nbytes], self._lend(place, form, dense_bytes(form), start)

    def borrow(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return host memory with the layout of `like`, borrowed until the tensor is dropped."""
        form = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
        nbytes = dense_bytes(form)
        return self._lend(self._take(nbytes), form, nbytes)

    def reload(self, host: Tensor) -> Copy:
        """Launch the copy back to the device, into newly allocated memory."""
        form = host.shape, host.stride()
        x = torch.empty_strided(*form, dtype=host.dtype, device=self.device)
        return self.move(x, host, H2D)

    def move(
        self, out: Tensor, source: Tensor, lane: str, lent: Tensor | None = None, what: str = ""
    ) -> Copy:
        """Launch a copy on a lane. The copy delays the next user of a place that it reads or fills.

        lent: the tensor borrowed from that place, if `out` or `source` is a part of it. The caller
            must protect other host memory from early reuse.
        what: the name of the moved data, for a recording, if no call of the schedule names it.
        """
        host = (out if lane == D2H else source) if lent is None else lent
        place, _ = self._lent.get(host.data_ptr(), (None, None))
        behind = None if place is None else place.event
        event = self._copy(out, source, lane, behind, what)
        if place is not None:
            place.event = event
        self.count(lane, dense_bytes(out))
        copy = Copy(self, out, source, lane, event)
        self._under_way[copy] = None
        return copy

    def _copy(self, out: Tensor, source: Tensor, lane: str, behind: Any, what: str) -> Any:
        if (beside := self.beside) is None:
            return self._lane(lane).copy(out, source, behind)
        marks: list[Any] = []
        mark = beside.mark
        event = self._lane(lane).copy(out, source, behind, lambda: marks.append(mark()))
        beside.copied(lane, what, dense_bytes(out), marks)
        return event

    def request(
        self, lane: str, what: str, nbytes: int, submit: Callable[[], Request]
    ) -> Callable[[], Request]:
        """Count a request to the disk; return the function that submits it and is recorded."""
        self.count(lane, nbytes)
        if (beside := self.beside) is None:
            return submit
        launched_ns = beside.launched_ns()

        def submitted() -> Request:
            request = submit()
            beside.requested(lane, what, nbytes, request.moment, launched_ns)
            return request

        return submitted

    def count(self, lane: str, nbytes: int) -> None:
        """Count bytes moved on a lane."""
        with self._lock:
            self.moved[lane].calls += 1
            self.moved[lane].nbytes += nbytes

    def join(self, lane: str, event: Any) -> None:
        """Make compute launched from now on wait for a copy; None means no copy."""
        if event is not None:
            self._lane(lane).join(event)

    def settle(self, copy: Copy) -> None:
        """Make the host wait for the end of a copy whose memory it is about to touch."""
        self._lane(copy.lane).settle(copy.event)

    def settle_place(self, tensor: Tensor) -> None:
        """Make the host wait for the last copy of a borrowed place, before overwriting it."""
        place, _ = self._lent[tensor.data_ptr()]
        if place.event is not None:
            self._lane(H2D).settle(place.event)

    def last_copy(self, tensor: Tensor) -> Callable[[], None] | None:
        """Return a function that waits on its thread for the last copy of a borrowed place.

        Returns None if that copy has ended, or if there was none.
        """
        event = self._lent[tensor.data_ptr()][0].event
        return None if event is None else partial(self._lane(H2D).settle, event)

    def finish(self, copy: Copy, source: Tensor) -> None:
        """Order the compute after a copy; its source is freed with its last reference."""
        del self._under_way[copy]
        self._lane(copy.lane).join(copy.event)
        if copy.lane == D2H and self.poison and source.is_floating_point():
            with torch.no_grad():
                source.fill_(float("nan"))

    def drain(self) -> None:
        """Order the compute after all copies in flight and drop them, after an exception."""
        for copy in list(self._under_way):
            copy.wait()

    # -- places -----------------------------------------------------------------------------
    def _lane(self, lane: str) -> Lane:
        if self._lanes is None:
            self._lanes = lanes_for(self.device)
        return self._lanes[lane == H2D]

    def _take(self, nbytes: int) -> Place:
        """Return a free place that fits, or else a new one."""
        with self._lock:
            free, _ = self._free.take(nbytes)
        return Place(nbytes, self.device) if free is None else free

    def _lend(self, place: Place, like: Tensor, nbytes: int, start: int = 0) -> Tensor:
        """Return a tensor with the layout of `like`; the place is free again once it is dropped."""
        flat = place.memory[start : start + nbytes].view(like.dtype)
        tensor = flat.as_strided(like.shape, like.stride())
        places = self._lock, self._lent, self._free
        back = partial(_give_back, places, tensor.data_ptr())
        with self._lock:
            self._lent[tensor.data_ptr()] = place, weakref.ref(tensor, back)
        return tensor


def _give_back(places: tuple[Any, dict[int, Any], FreeBuffers[Place]], at: int, _: Any) -> None:
    lock, lent, free = places
    with lock:
        place, _ = lent.pop(at)
        free.give_back(place.nbytes, place)


def dense_bytes(x: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
