"""Shards on NVMe of one model on one rank: one file per kind, and transfers to and from them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from zerofx.nvme.checksum import covering
from zerofx.nvme.folder import prepare
from zerofx.nvme.request import Request
from zerofx.nvme.store import Mapped, NvmeStore
from zerofx.runtime.tiers.arrival import Arrival
from zerofx.runtime.tiers.beside import Beside
from zerofx.runtime.tiers.host_tier import NVME_READ, NVME_WRITE, HostTier, host_memory

PARAMETERS, GRADIENTS = "parameters", "gradients"


class NvmeHome:
    """Files with one place per bucket: parameters, gradients, and each kind of optimizer state.

    The tiles of a parameter share one place, under the first of their buckets. A place can be
    accessed as a tensor that maps the file's memory (`place`), or moved through buffers on the host
    (`read`, `write`), both by the schedule and by its update thread.

    names: the name of each place in errors.
    parts: bucket -> (the place's bucket, start, stop, bytes of the whole place).
    on_update: called with each place of parameters and its values before they are written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        host: HostTier,
        names: Mapping[int, str],
        parts: Mapping[int, tuple[int, int, int, int]],
        writes: Callable[[], int],
    ) -> None:
        self._folder, self._rank, self._host, self._names = folder, rank, host, names
        self._parts = parts
        self._writes_of_others, self._seen = writes, -1
        self._stores: dict[tuple[str, int], NvmeStore] = {}  # by kind and bucket
        self._places: dict[tuple[str, int], Mapped] = {}
        self._writes: list[Request] = []
        self._reads: set[Arrival] = set()
        self._early: dict[tuple[str, int], Arrival] = {}  # reads launched before they are needed
        self._lock = threading.RLock()
        self.on_update: Callable[[], Callable[[int, Tensor], None] | None] | None = None

    def reserve(self, kind: str, sizes: Mapping[int, int]) -> None:
        """Create a file of a kind, with room in bytes for each bucket.

        Raises:
            NvmeError: the folder cannot be used, or has too little space.
        """
        extents = {self._names[index]: nbytes for index, nbytes in sizes.items()}
        store = NvmeStore.create(self._folder, extents, label=f"rank{self._rank}-{kind}")
        with self._lock:
            self._stores |= {(kind, index): store for index in sizes}

    def need_space(self, nbytes: int, what: str) -> None:
        """Check that the folder has space for all data that will be stored there.

        Raises:
            NvmeError: it cannot be used, or has too little space; the message has both numbers.
        """
        prepare(self._folder, nbytes, what)

    def has(self, kind: str, bucket: int) -> bool:
        """Return whether a file of this kind has room for a bucket."""
        return (kind, bucket) in self._stores

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(store.nbytes for store in self._files)

    @property
    def _files(self) -> list[NvmeStore]:
        return list(dict.fromkeys(self._stores.values()))

    def close(self) -> None:
        """Remove the files, if a model could not be created."""
        for store in self._files:
            store.close()

    def place(self, kind: str, bucket: int, dtype: torch.dtype) -> Tensor:
        """Return a bucket's place in the file of a kind, as a 1-D tensor."""
        key = kind, bucket
        with self._lock, torch.inference_mode(False):
            if key not in self._places:
                self._places[key] = Mapped(self._stores[key], self._names[bucket])
            return self._places[key].memory.view(dtype)

    @property
    def beside(self) -> Beside | None:
        """The recorder of transfers, while one records."""
        return self._host.beside

    # -- transfers --------------------------------------------------------------------------
    def read(self, kind: str, bucket: int, dtype: torch.dtype) -> Arrival:
        """Launch the read of a bucket's place into a host buffer; zeros if never written."""
        nbytes = self._places[kind, bucket].memory.numel()
        return self._read(kind, bucket, dtype, 0, nbytes, nbytes)

    def read_shard(self, bucket: int, dtype: torch.dtype) -> Arrival:
        """Launch the read of a bucket's shard, which is its whole place or one tile of it."""
        place, *stretch = self._parts[bucket]
        return self._read(PARAMETERS, place, dtype, *stretch)

    def _read(
        self, kind: str, place: int, dtype: torch.dtype, start: int, stop: int, nbytes: int
    ) -> Arrival:
        """Launch the read of bytes start:stop of a place of `nbytes`, in whole checksum blocks."""
        first, last = covering(start, stop, nbytes)
        numel = (stop - start) // dtype.itemsize
        with self._lock:
            mapped = self._places[kind, place]
            self._settle_parameters()
            if not mapped.is_settled:
                self.join()  # requests in flight have checksums of their own
                mapped.settle()
            room, out = self._host.borrow_within(last - first, start - first, numel, dtype)
            if not mapped.is_written:
                return Arrival(out.zero_(), None, self._reads)
            store, name = self._stores[kind, place], self._names[place]
            submit = partial(store.read_blocks, name, first, room)
            request = self._host.request(NVME_READ, f"b{place}", room.nbytes, submit)()
        return Arrival(out, request, self._reads)

    def _settle_parameters(self) -> None:
        """Account for writes through the places of parameters, not all of which torch counts.

        Places that were not written recently keep their checksums only if nothing was written at
        all.
        """
        if (writes := self._writes_of_others()) == self._seen:
            return
        self._seen = writes
        self.join()  # as above
        for (kind, _), mapped in self._places.items():
            if kind == PARAMETERS:
                mapped.settle()

    def fetch(self, view: Tensor) -> Tensor:
        """Return the values of a tensor in a place: read directly, verified, in host memory.

        A tensor that is in no place is returned unchanged.

        Raises:
            NvmeError: it cannot be read, or is damaged; names file, offset and bucket.
        """
        found = self._place_of(view)
        if found is None:
            return view
        (kind, bucket), start = found
        nbytes = self._places[kind, bucket].memory.numel()
        arrival = self._read(kind, bucket, view.dtype, start, start + view.nbytes, nbytes)
        # Use separate memory, since a place belongs to its own tensor only. It is mapped, since the
        # allocator's heap would not shrink again.
        out, _ = host_memory(view.nbytes, view.device)
        return out.view(view.dtype).copy_(arrival.wait()).view(view.shape)

    def release(self, view: Tensor) -> None:
        """Give back the memory taken by reading a tensor, if it is in a place."""
        found = self._place_of(view)
        if found is not None:
            self._places[found[0]].rest()

    def _place_of(self, view: Tensor) -> tuple[tuple[str, int], int] | None:
        """Return the place in which a tensor begins, and its byte offset there."""
        if not view.numel() or view.device.type != "cpu":
            return None
        at = view.data_ptr()
        with self._lock:
            for key, mapped in self._places.items():
                start = at - mapped.memory.data_ptr()
                if 0 <= start < mapped.memory.numel():
                    return key, start
        return None

    def prefetch(self, bucket: int, dtype: torch.dtype) -> None:
        """Launch the reads for a bucket's update: its parameters and its states.

        Does nothing while another bucket's reads have not been taken, since each holds host memory.
        """
        with self._lock:
            if self._early:
                return
            for key in self._places:
                if key[1] == bucket and key[0] != GRADIENTS:
                    self._early[key] = self.read(*key, dtype)

    def take(self, kind: str, bucket: int, dtype: torch.dtype) -> Arrival:
        """Return a read that was launched early, or launch it now."""
        with self._lock:
            early = self._early.pop((kind, bucket), None)
            if early is not None and self._places[kind, bucket].is_settled:
                return early
            if early is not None:  # written through its place since
                early.drop()
            return self.read(kind, bucket, dtype)

    def drop_early(self, bucket: int | None = None) -> None:
        """Drop early reads that an update did not take: of one bucket, or all."""
        with self._lock:
            for key in [k for k in self._early if bucket in (None, k[1])]:
                self._early.pop(key).drop()

    def write(self, kind: str, bucket: int, values: Tensor) -> None:
        """Launch the write of a bucket's place from a buffer on the host."""
        if kind == PARAMETERS and self.on_update and (told := self.on_update()):
            told(bucket, values)
        self._places[kind, bucket].is_written = True
        submit = partial(self._stores[kind, bucket].write, self._names[bucket], values)
        request = self._host.request(NVME_WRITE, f"b{bucket}", values.nbytes, submit)()
        with self._lock:
            self._writes.append(request)

    def join(self, leave: int = 0) -> None:
        """Wait for the writes in flight except the last `leave`, so that their buffers are free.

        Raises:
            NvmeError: a write failed; names file, offset and bucket.
        """
        while (request := self._oldest_write(leave)) is not None:
            try:
                request.wait()
            finally:
                with self._lock:  # another thread may have waited for it too
                    self._writes = [r for r in self._writes if r is not request]

    def _oldest_write(self, leave: int) -> Request | None:
        """Return the oldest write in flight, if there are more than `leave`."""
        with self._lock:
            return self._writes[0] if len(self._writes) > leave else None

    def drain(self) -> None:
        """Wait for all requests in flight after an exception, which takes precedence."""
        self.drop_early()
        with self._lock:
            writes, self._writes = self._writes, []
            reads = list(self._reads)
        for arrival in reads:
            arrival.drop()  # its waiter is gone, and its memory is used again
        for request in writes:
            request.join()  # if it failed, the place has no checksum, and its reader is told

    def rest(self) -> None:
        """Give back the memory that holds pages of the files."""
        with self._lock:
            for mapped in self._places.values():
                mapped.rest()
