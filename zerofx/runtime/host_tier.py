"""The host tier: where values wait between forward and backward, and the copies there and back.

Host memory is a pool of its own beside the device's allocator, on CPU-only machines too. A place is
lent to one call's value for as long as that call holds it, and then to another: places are made at
first need and kept.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofx.runtime.copy_lanes import Lane, lanes_for

D2H, H2D = "d2h", "h2d"


@dataclass
class Moved:
    """What has been copied in one direction."""

    calls: int = 0
    nbytes: int = 0


class Place:
    """A stretch of host memory, and the last copy out of it or into it."""

    __slots__ = ("event", "memory")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # it outlives the mode that first asked for it
            if device.type == "cuda":
                self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:  # outside torch's allocator, as pinned memory is: what counts there counts device
                self.memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.event: Any = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class Copy:
    """A copy under way: `tensor`, where it arrives, may be read only after `wait`."""

    __slots__ = ("_event", "_source", "_tier", "tensor")

    def __init__(self, tier: HostTier, tensor: Tensor, source: Tensor, event: Any) -> None:
        self.tensor: Tensor | None = tensor
        self._tier, self._event = tier, event
        self._source: Tensor | None = source

    def wait(self) -> Tensor:
        """Order what follows behind the copy, let go of its source, and return what arrived."""
        tensor, source = self.tensor, self._source
        assert tensor is not None and source is not None, "a copy was waited for before"
        self._tier.finish(self, source, self._event)
        # the schedule's name for this copy outlives it
        self.tensor = self._source = self._event = None
        return tensor


class HostTier:
    """The host memory of one model on one rank, and its two lanes of copies.

    poison: fill what has left with NaN once its memory is given back, so that a read before its
        reload cannot go unseen.
    moved: lane -> what was copied on it so far.
    """

    def __init__(
        self, device: torch.device, poison: bool = False, lanes: tuple[Lane, Lane] | None = None
    ) -> None:
        self.device, self.poison = device, poison
        self.moved = {D2H: Moved(), H2D: Moved()}
        self._lanes = lanes
        self._free: dict[int, list[Place]] = {}  # by bytes
        self._lent: dict[int, tuple[Place, weakref.ref]] = {}  # by address
        self._under_way: dict[Copy, bool] = {}  # copy -> does it leave the device

    @property
    def nbytes(self) -> int:
        """Bytes of all places, lent or free."""
        free = sum(p.nbytes for places in self._free.values() for p in places)
        return free + sum(p.nbytes for p, _ in self._lent.values())

    @property
    def num_lent(self) -> int:
        """How many values wait on the host now."""
        return len(self._lent)

    # -- what a schedule calls --------------------------------------------------------------
    def offload(self, x: Tensor) -> Copy:
        """Launch the copy of a whole storage to the host; `x` is held until its wait."""
        nbytes = dense_bytes(x)
        place = self._take(nbytes)
        host = self._lend(place, x, nbytes)
        place.event = self._lane(0).copy(host, x, place.event)
        return self._launched(Copy(self, host, x, place.event), D2H, nbytes)

    def reload(self, host: Tensor) -> Copy:
        """Launch the copy back to the device, into memory of its own."""
        form = host.shape, host.stride()
        x = torch.empty_strided(*form, dtype=host.dtype, device=self.device)
        place, _ = self._lent[host.data_ptr()]
        place.event = self._lane(1).copy(x, host, place.event)
        return self._launched(Copy(self, x, host, place.event), H2D, dense_bytes(host))

    def _launched(self, copy: Copy, lane: str, nbytes: int) -> Copy:
        self.moved[lane].calls += 1
        self.moved[lane].nbytes += nbytes
        self._under_way[copy] = lane == D2H
        return copy

    def finish(self, copy: Copy, source: Tensor, event: Any) -> None:
        """Order the compute behind a copy; what has left is given back by who drops it last."""
        leaves = self._under_way.pop(copy)
        self._lane(0 if leaves else 1).join(event)
        if leaves and self.poison and source.is_floating_point():
            with torch.no_grad():
                source.fill_(float("nan"))

    def drain(self) -> None:
        """Order the compute behind all copies under way and let go of them, after an exception."""
        for copy in list(self._under_way):
            copy.wait()

    # -- places -----------------------------------------------------------------------------
    def _lane(self, which: int) -> Lane:
        if self._lanes is None:
            self._lanes = lanes_for(self.device)
        return self._lanes[which]

    def _take(self, nbytes: int) -> Place:
        """Return the smallest free place that fits; else a new one, instead of a free smaller."""
        if same := self._free.get(nbytes):
            return same.pop()
        sizes = [size for size, places in self._free.items() if places]
        if fitting := [size for size in sizes if size > nbytes]:
            return self._free[min(fitting)].pop()
        if sizes:
            self._free[max(sizes)].pop()
        return Place(nbytes, self.device)

    def _lend(self, place: Place, like: Tensor, nbytes: int) -> Tensor:
        """Return a tensor of the form of `like`; the place is free again once nobody holds it."""
        flat = place.memory[:nbytes].view(like.dtype)
        tensor = flat.as_strided(like.shape, like.stride())
        back = partial(_give_back, self._lent, self._free, place.memory.data_ptr())
        self._lent[place.memory.data_ptr()] = place, weakref.ref(tensor, back)
        return tensor


def _give_back(
    lent: dict[int, tuple[Place, weakref.ref]], free: dict[int, list[Place]], address: int, _: Any
) -> None:
    place, _ = lent.pop(address)
    free.setdefault(place.nbytes, []).append(place)


def dense_bytes(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
