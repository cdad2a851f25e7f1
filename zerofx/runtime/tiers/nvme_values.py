"""Values on NVMe between forward and backward, and the transfers to and from it."""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zerofx.errors import NvmeError, as_sentence
from zerofx.nvme.aligned import up
from zerofx.nvme.folder import prepare
from zerofx.nvme.request import Request
from zerofx.nvme.store import NvmeStore
from zerofx.runtime.tiers.host_tier import NVME_READ, NVME_WRITE, HostTier, dense_bytes

log = logging.getLogger("zerofx")


@dataclass(frozen=True)
class _Place:
    """A value's place in a file."""

    store: NvmeStore
    extent: str


class Stored:
    """A value on NVMe; its place becomes free once this object is dropped."""

    __slots__ = ("__weakref__", "form", "name", "place")

    def __init__(self, name: str, form: Tensor, place: _Place) -> None:
        self.name, self.form, self.place = name, form, place


class Spill:
    """A write or a read in flight: its result may be used only after `wait`."""

    __slots__ = ("_begun", "_host", "_stored", "_values", "is_write")

    def __init__(
        self,
        values: NvmeValues,
        stored: Stored,
        host: Tensor,
        is_write: bool,
        begun: Callable[[], Request],
    ) -> None:
        self._values, self.is_write, self._begun = values, is_write, begun
        self._stored: Stored | None = stored
        self._host: Tensor | None = host

    @property
    def form(self) -> Tensor:
        """A tensor with the value's layout but no data."""
        assert self._stored is not None, "the transfer was already waited for"
        return self._stored.form

    @property
    def tensor(self) -> Tensor | None:
        """The destination of a read."""
        return None if self.is_write else self._host

    def wait(self) -> Tensor | Stored:
        """Wait on the host for the transfer; return the reloaded tensor or the stored value."""
        stored, host = self._stored, self._host
        assert stored is not None and host is not None, "the transfer was already waited for"
        # the schedule's variable outlives this
        self._stored = self._host = None
        self._values.finish(self, host)
        self._begun = _over
        return stored if self.is_write else host

    def join(self) -> None:
        """Wait for the end of the transfer, whether it succeeds or fails.

        Raises:
            Exception: it could not even start.
        """
        self._begun().join()

    def end(self) -> None:
        """Wait for the end of the transfer.

        Raises:
            NvmeError: it failed; names file, offset and value.
        """
        self._begun().wait()


class NvmeValues:
    """The values of one model's calls on one rank that are in files, each in its own place.

    A place belongs to one call's value for as long as that call holds it, and is then reused for
    another value of the same size. The places of one call are created with its program. Those of
    further live calls are created on first need, each set in a file of its own.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, rank: int, host: HostTier) -> None:
        self._folder, self._rank, self._host = folder, rank, host
        # The places that one call of each program needs, by name.
        self._sets: list[Mapping[str, int]] = []
        self._files: list[NvmeStore] = []
        self._free: dict[int, list[_Place]] = {}  # by size in bytes
        self._num_made: Counter[int] = Counter()  # number of places, by size in bytes
        self._under_way: dict[Spill, None] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(store.nbytes for store in self._files)

    @property
    def num_lent(self) -> int:
        """The number of values currently on NVMe."""
        return sum(self._num_made.values()) - sum(map(len, self._free.values()))

    def reserve(self, sizes: Mapping[str, int], whose: str) -> None:
        """Reserve space for one call of a program: sizes in bytes, by the name of each value.

        Raises:
            NvmeError: the folder cannot be used, or has too little space; the message has both
                numbers.
        """
        if sizes:
            self._sets.append(sizes)
            self._make(self._missing(sizes), whose)

    def forget(self, sizes: Mapping[str, int]) -> None:
        """Release the reservation for one call of a program, and files that no other needs.

        A file stays as long as a value is in it, or a call of another program may need a place.
        """
        if not sizes:
            return
        self._sets.remove(sizes)
        needed: Counter[int] = Counter()
        for each in self._sets:
            needed |= Counter(each.values())
        for store in list(self._files):
            places = Counter(store.extents.values())
            free = {
                nbytes: [p for p in self._free.get(nbytes, []) if p.store is store]
                for nbytes in places
            }
            is_free = all(len(free[nbytes]) == num for nbytes, num in places.items())
            if is_free and needed <= self._num_made - places:
                for nbytes, found in free.items():
                    for place in found:
                        self._free[nbytes].remove(place)
                self._num_made -= places
                self._files.remove(store)
                store.close()

    def _missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the values without a place, assuming that all existing places were free."""
        left, missing = self._num_made.copy(), {}
        for name, nbytes in sizes.items():
            if left[nbytes]:
                left[nbytes] -= 1
            else:
                missing[name] = nbytes
        return missing

    def _make(self, sizes: Mapping[str, int], whose: str) -> None:
        if not sizes:
            return
        # For an adopted program: the model's own plan was checked for its folder.
        if self._folder is None:
            raise NvmeError(
                f"activations of {whose} are stored on NVMe in this program, but the model was "
                "compiled without a folder there. Compile it with Plan(offload={'activations': "
                "'nvme', 'path': ...})."
            )
        needed = sum(map(up, sizes.values()))
        what = f"{len(sizes)} activations of {whose} on rank {self._rank}"
        prepare(self._folder, needed, what)
        store = NvmeStore.create(self._folder, sizes, label=f"rank{self._rank}-activations")
        self._files.append(store)
        for name, nbytes in sizes.items():
            self._num_made[nbytes] += 1
            self._free.setdefault(nbytes, []).append(_Place(store, name))

    def _take(self, nbytes: int, name: str) -> _Place:
        """Return a free place; if there is none, another call is live, and gets its own set."""
        if not self._free.get(nbytes):
            known = (s for s in reversed(self._sets) if nbytes in s.values())
            self._make(next(known, {name: nbytes}), "one more live call")
        return self._free[nbytes].pop()

    # -- what a schedule calls --------------------------------------------------------------
    def write_out(self, host: Tensor, name: str) -> Spill:
        """Launch the write of a value that was copied to the host, or is still in flight to it.

        name: the activation's name, for errors.
        """
        nbytes = dense_bytes(host)
        place = self._take(nbytes, name)
        form = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")
        stored = Stored(name, form, place)
        weakref.finalize(stored, self._free[nbytes].append, place).atexit = False
        flat = _flat(host)
        write = partial(place.store.write, place.extent, flat, name)
        return self._begin(stored, host, self._host.request(NVME_WRITE, "", nbytes, write))

    def read_back(self, stored: Stored) -> Spill:
        """Launch the read of a value into host memory."""
        form, place, name = stored.form, stored.place, stored.name
        host = self._host.borrow(form, form.dtype)
        flat = _flat(host)
        read = partial(place.store.read, place.extent, flat, name)
        submit = self._host.request(NVME_READ, "", dense_bytes(form), read)
        return self._begin(stored, host, submit, is_write=False)

    def _begin(
        self, stored: Stored, host: Tensor, submit: Callable[[], Request], is_write: bool = True
    ) -> Spill:
        """Submit a request after the last copy of its place on the host.

        If that copy involves a device, a thread waits for it, so that the host can continue
        launching. The thread handles requests in order, so that operations on a place keep their
        order.
        """
        settled = self._host.last_copy(host)
        if settled is None:
            request = submit()
            spill = Spill(self, stored, host, is_write, lambda: request)
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="zerofx-spill")
                weakref.finalize(self, self._thread.shutdown, wait=False)
            spill = Spill(
                self, stored, host, is_write, self._thread.submit(_behind, settled, submit).result
            )
        self._under_way[spill] = None
        return spill

    def finish(self, spill: Spill, host: Tensor) -> None:
        """Wait for the end of a write or a read; a written value is no longer on the host."""
        del self._under_way[spill]
        spill.end()
        if spill.is_write and self._host.poison:
            with torch.no_grad():
                _flat(host).view(torch.uint8).fill_(0xFF)  # NaN in every floating-point format

    def drain(self) -> None:
        """Wait for transfers in flight after an exception, which takes precedence over theirs."""
        while self._under_way:
            spill, _ = self._under_way.popitem()
            try:
                spill.join()
            except Exception as error:  # noqa: BLE001  (a copy lost by its device)
                log.error("a transfer to or from NVMe failed as well: %s", as_sentence(error))


def _over() -> Request:
    raise AssertionError("the transfer was already waited for.")


def _behind(settled: Callable[[], None], submit: Callable[[], Request]) -> Request:
    settled()
    return submit()


def _flat(host: Tensor) -> Tensor:
    """Return the memory of a dense tensor, 1-D."""
    return host.as_strided((dense_bytes(host) // host.element_size(),), (1,))
