"""A store: a preallocated file with named, checksummed extents, one per rank and kind of data."""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Mapping
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor

from zerofx.compat.tensors import version_of
from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE, Bytes, bytes_of, up
from zerofx.nvme.checksum import BLOCK_BYTES, checksums, covering
from zerofx.nvme.engine import IOEngine, default_engine
from zerofx.nvme.faults import Damaged, path_error, sized
from zerofx.nvme.folder import lock, need_space, prepare, unique_name, whoami
from zerofx.nvme.handle import Handle
from zerofx.nvme.header import Extent, Layout, State, check_sizes, need_whole, read_layout
from zerofx.nvme.request import Request

# -- The checksums of a store's blocks: computed while writing, compared while reading -------------


class Blocks:
    """The checksums of one extent's blocks; 0 if a block does not hold what was last written."""

    def __init__(self, sums: np.ndarray, extent: Extent, layout: Layout) -> None:
        self._sums, self._extent, self._takes = sums, extent, layout.has_checksums

    def _of(self, offset: int, view: Bytes) -> slice:
        first = self._extent.first_block + (offset - self._extent.offset) // BLOCK_BYTES
        return slice(first, first - (-view.size // BLOCK_BYTES))

    def before_write(self, offset: int, view: Bytes) -> None:
        self._sums[self._of(offset, view)] = 0

    def after_write(self, offset: int, view: Bytes) -> None:
        self._sums[self._of(offset, view)] = checksums(view) if self._takes else 1

    def after_read(self, offset: int, view: Bytes) -> None:
        written = self._sums[self._of(offset, view)]
        found = checksums(view) if self._takes else np.minimum(written, np.uint64(1))
        if np.array_equal(found, written) and written.all():
            return
        bad = int(np.flatnonzero((found != written) | (written == 0))[0])
        at, expected = offset + bad * BLOCK_BYTES, int(written[bad])
        if not expected:
            raise Damaged(
                f"the block at offset {at} has no valid content: it was never written, or its last "
                "write failed. Write it first."
            )
        nbytes = min(BLOCK_BYTES, view.size - bad * BLOCK_BYTES)
        raise Damaged(
            f"the block at offset {at} ({nbytes} bytes) has the checksum {int(found[bad]):016x} "
            f"but {expected:016x} was written: the device or the file is damaged, or a state was "
            "changed in a way that torch does not track (.data, numpy). Load the last save, and "
            "check the device."
        )


def read_sums(handle: Handle, layout: Layout) -> np.ndarray:
    """Return the checksums that the last flush wrote."""
    page = os.pread(handle.buffered, PAGE, layout.state_at)
    state = State.decode(page)
    if state is None:
        raise NvmeError(
            f"{handle.path}: the state at offset {layout.state_at} does not match its checksum: "
            "the file is damaged. Write it again."
        )
    if not state.num_flushes:
        raise NvmeError(
            f"{handle.path}: never flushed by {layout.maker}, so nothing in it can be verified. "
            "Write it again, and flush."
        )
    sums = os.pread(handle.buffered, 8 * layout.num_blocks, layout.sums_at)
    if zlib.crc32(sums) != state.crc_of_sums:
        raise NvmeError(
            f"{handle.path}: the checksums at offset {layout.sums_at} are not those of the last "
            "flush: it was interrupted, or the file is damaged. Write it again."
        )
    return np.frombuffer(sums, dtype=np.uint64)


# -- The store -------------------------------------------------------------------------------------


class NvmeStore:
    """Named extents in one file, moved by an I/O engine.

    Requests of one extent take effect in the order of their submission: a read returns the result
    of the last write before it, even while that write is in flight. Every read is verified by the
    checksums computed while writing. They are kept in memory; `flush` and `close(delete=False)`
    write them to the file, which `NvmeStore.open` can then read back. Without either, the file is
    useless to other processes, and is removed when this process ends or at the next start.
    """

    def __init__(
        self, handle: Handle, layout: Layout, sums: np.ndarray, engine: IOEngine, can_write: bool
    ) -> None:
        self.path, self.label, self.can_write = handle.path, layout.label, can_write
        self._handle, self._layout, self._sums, self._engine = handle, layout, sums, engine
        self._num_flushes = 0
        self._mapping: mmap.mmap | None = None
        self._forget = weakref.finalize(self, _unlink, handle.path, os.getpid())
        if not can_write:
            self._forget.detach()

    # -- creating and opening ---------------------------------------------------------------
    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        extents: Mapping[str, int],
        *,
        label: str,
        engine: IOEngine | None = None,
        checksums: bool = True,
    ) -> NvmeStore:
        """Create a file in `folder` with space for every extent, given in bytes by name.

        label: the owner, for the file's name and for errors: `rank0-optimizer`.
        checksums: compute one per 256 KiB written, and compare it when reading.

        Raises:
            NvmeError: the folder cannot be used (see `prepare`), or has too little space.
        """
        check_sizes(extents, label)
        layout = Layout(dict(extents), label, checksums, whoami())
        home = prepare(folder)
        need_space(home, layout.nbytes, label)
        path = os.fspath(home / unique_name(label))
        handle = Handle(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, pads=True)
        try:
            # locked before it is recognisable as a store: no cleaner can take it for a dead one
            is_locked = lock(handle.buffered)
            assert is_locked, f"{path} is new, and yet locked"
            os.pwrite(handle.buffered, layout.encode() + State().encode(), 0)
            os.posix_fallocate(handle.buffered, 0, layout.nbytes)
        except OSError as error:
            handle.close()
            os.unlink(path)
            doing = f"cannot reserve {sized(layout.nbytes)} for {label} in"
            raise path_error(doing, path, error) from error
        sums = np.zeros(layout.num_blocks, dtype=np.uint64)
        return cls(handle, layout, sums, engine or default_engine(), can_write=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, engine: IOEngine | None = None) -> NvmeStore:
        """Open a store that was flushed or kept, for reading.

        Raises:
            NvmeError: the file is foreign, of another format version, damaged, truncated, never
                flushed, or in use by another process.
        """
        handle = Handle(os.path.abspath(path), os.O_RDONLY, pads=True)
        try:
            layout = read_layout(handle.buffered, handle.path)
            need_whole(handle.buffered, handle.path, layout)
            if not lock(handle.buffered, shared=True):
                raise NvmeError(
                    f"{handle.path}: in use by {layout.maker}. Wait for it to end, or let it "
                    "close(delete=False)."
                )
            sums = read_sums(handle, layout)
        except NvmeError:
            handle.close()
            raise
        except OSError as error:
            handle.close()
            raise path_error("cannot read", handle.path, error) from error
        return cls(handle, layout, sums, engine or default_engine(), can_write=False)

    # -- moving -----------------------------------------------------------------------------
    def read(self, name: str, out: Tensor, label: str = "") -> Request:
        """Begin to fill `out`, which must have the size of the extent.

        label: its name in errors, if it differs from the extent's name.
        """
        extent = self._find(name, out)
        blocks = Blocks(self._sums, extent, self._layout)
        return self._engine.submit_read(self._handle, out, extent.offset, label or name, blocks)

    def read_blocks(self, name: str, start: int, out: Tensor, label: str = "") -> Request:
        """Begin to fill `out` from byte `start` of an extent on: whole blocks, as in `covering`."""
        extent = self._layout.extents[name]
        stop = start + out.nbytes
        assert covering(start, stop, extent.nbytes) == (start, stop), f"{start}:{stop} of {name}"
        blocks = Blocks(self._sums, extent, self._layout)
        at = extent.offset + start
        return self._engine.submit_read(self._handle, out, at, label or name, blocks)

    def write(self, name: str, tensor: Tensor, label: str = "") -> Request:
        """Begin to write an extent from `tensor`, which must have its size."""
        extent = self._find(name, tensor)
        if not self.can_write:
            raise NvmeError(f"{self.path}: open for reading only. {name} cannot be written here.")
        blocks = Blocks(self._sums, extent, self._layout)
        return self._engine.submit_write(self._handle, tensor, extent.offset, label or name, blocks)

    def place(self, name: str) -> tuple[mmap.mmap, int, int]:
        """Return (mapping of the whole file, offset, bytes) of an extent.

        The mapping uses a file descriptor of its own. With the store's, it would keep the file's
        lock if it outlives the store or is inherited by a fork.
        """
        if self._mapping is None:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._mapping = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED)
                finally:
                    os.close(fd)
            except OSError as error:
                raise path_error("cannot map", self.path, error) from error
        extent = self._layout.extents[name]
        return self._mapping, extent.offset, extent.nbytes

    def trust(self, name: str, content: Tensor) -> None:
        """Compute the checksums of an extent from content that was written without this store."""
        extent = self._find(name, content)
        view, _ = bytes_of(content, self.path, name)
        Blocks(self._sums, extent, self._layout).after_write(extent.offset, view)

    def _find(self, name: str, tensor: Tensor) -> Extent:
        extent = self._layout.extents.get(name)
        if extent is None:
            near = get_close_matches(name, self._layout.extents, 1)
            hint = f". The nearest is {near[0]}" if near else ""
            raise NvmeError(f"{self.path} has no extent {name!r}{hint}.")
        if isinstance(tensor, Tensor) and tensor.nbytes != extent.nbytes:
            raise NvmeError(
                f"{self.path}: {name} has {sized(extent.nbytes)} but the tensor "
                f"{tensor.dtype}{list(tensor.shape)} has {sized(tensor.nbytes)}. Give a tensor of "
                "its size."
            )
        return extent

    def wait(self) -> None:
        """Wait until no request is in flight; raise the first unreported fault."""
        self._engine.wait(self._handle)

    def flush(self) -> None:
        """Wait, make all extents durable, and write their checksums to the file."""
        self._flush(is_kept=False)

    def _flush(self, is_kept: bool) -> None:
        self._engine.flush(self._handle)
        self._num_flushes += 1
        sums = self._sums.tobytes()
        state = State(is_kept, self._num_flushes, zlib.crc32(sums))
        try:
            fd, layout = self._handle.buffered, self._layout
            os.pwrite(fd, state.encode() + sums, layout.state_at)
            os.fdatasync(fd)
        except OSError as error:
            raise path_error("cannot write the checksums of", self.path, error) from error

    # -- closing ----------------------------------------------------------------------------
    def close(self, delete: bool = True) -> None:
        """Wait for requests in flight and close; delete the file, or keep it to be opened again.

        Raises:
            NvmeError: a request failed that was not waited for, or the file cannot be kept.
        """
        if self._handle.is_closed:
            return
        try:
            if self.can_write and not delete:
                self._flush(is_kept=True)
                self._forget.detach()
            else:
                self._engine.finish(self._handle)
        finally:
            self._handle.close()
            self._forget()

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self._handle.is_closed:  # do not hide the first exception
            self._engine.drain(self._handle)
            self._handle.failed.clear()
        self.close()

    @property
    def extents(self) -> dict[str, int]:
        """The size of every extent in bytes, by name."""
        return dict(self._layout.sizes)

    @property
    def nbytes(self) -> int:
        """The size of the whole file in bytes, including header and checksums."""
        return self._layout.nbytes

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._handle.is_direct


def _unlink(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)


# -- Extents as tensors for users, while the schedule moves the same bytes by requests -------------
# The tensor is a shared mapping of the extent's range of the file, so reading it always gives the
# content of the file, and it holds no memory that the system cannot reclaim. The schedule reads and
# writes the same bytes by direct requests. The kernel keeps the two consistent: a direct read first
# writes dirty pages out, and a direct write drops the pages that it makes outdated. Data written
# through the mapping have no checksum until `settle`.


class Mapped:
    """One extent as a tensor of bytes, and whether something was written through the tensor.

    is_written: whether it was ever given content; until then it is zeros.
    """

    def __init__(self, store: NvmeStore, name: str) -> None:
        self._store, self._name = store, name
        self._map, offset, nbytes = store.place(name)
        with torch.inference_mode(False):
            self.memory = (  # a storage of its own: copying it does not copy other extents
                torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
                if nbytes
                else torch.empty(0, dtype=torch.uint8)
            )
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE  # the system's page size may be larger
        self._pages = begin, up(offset + nbytes) - begin
        self.is_written = False
        self._version = version_of(self.memory)

    @property
    def is_settled(self) -> bool:
        """Whether nothing was written through it since `settle`, as far as torch counts writes."""
        return version_of(self.memory) == self._version

    def settle(self) -> None:
        """Write the tensor out to the device, and compute the checksums of its content.

        Raises:
            NvmeError: the device refuses the write; names the file and the extent.
        """
        self._version = version_of(self.memory)
        try:
            self._map.flush(*self._pages)
        except OSError as error:
            doing = f"cannot write {self._name} to"
            raise path_error(doing, self._store.path, error) from error
        self._store.trust(self._name, self.memory)
        self.is_written = True
        self.rest()

    def rest(self) -> None:
        """Release the memory that caches pages of the file; their content is kept."""
        self._map.madvise(mmap.MADV_DONTNEED, *self._pages)
