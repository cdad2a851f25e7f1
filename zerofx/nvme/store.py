"""A preallocated file with a named, checksummed place for each value: one a rank and kind."""

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

# -- The checksums of a store's blocks: taken while writing, compared while reading ----------------


class Blocks:
    """The checksums of one extent's blocks: 0 while a block does not hold what was written."""

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
                f"the block at offset {at} holds nothing that was written: it was never written, "
                "or its last write failed; write it first"
            )
        nbytes = min(BLOCK_BYTES, view.size - bad * BLOCK_BYTES)
        raise Damaged(
            f"the block at offset {at} ({nbytes} bytes) has the checksum {int(found[bad]):016x} "
            f"but {expected:016x} was written: the device or the file is damaged, or a state was "
            "written where torch does not count it (.data, numpy); load the last save, and check "
            "the device"
        )


def read_sums(handle: Handle, layout: Layout) -> np.ndarray:
    """Return the checksums as the last flush wrote them."""
    page = os.pread(handle.buffered, PAGE, layout.state_at)
    state = State.decode(page)
    if state is None:
        raise NvmeError(
            f"{handle.path}: the state at offset {layout.state_at} does not have its checksum: the "
            "file is damaged; write it anew"
        )
    if not state.num_flushes:
        raise NvmeError(
            f"{handle.path}: never flushed by {layout.maker}, so that nothing in it can be "
            "proved; write it anew, and flush"
        )
    sums = os.pread(handle.buffered, 8 * layout.num_blocks, layout.sums_at)
    if zlib.crc32(sums) != state.crc_of_sums:
        raise NvmeError(
            f"{handle.path}: the checksums at offset {layout.sums_at} are not those of the last "
            "flush: it was interrupted, or the file is damaged; write it anew"
        )
    return np.frombuffer(sums, dtype=np.uint64)


# -- A preallocated file with a named, checksummed place for each value: one a rank and kind -------


class NvmeStore:
    """Named extents in one file, moved by an I/O engine.

    What one extent's requests do is in the order of their submission: a read gives what the last
    write before it wrote, also while that is under way. Every read is proved by the checksums that
    were taken while writing. They are kept in memory; `flush` and `close(delete=False)` write them
    to the file, which can then be read back by `NvmeStore.open`. Without either the file is worth
    nothing to another process, and is removed when this one ends, or at the next start.
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

    # -- made and opened --------------------------------------------------------------------
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
        """Make a file in `folder` with room for every extent, given in bytes by name.

        label: whose it is, for the file's name and for errors: `rank0-optimizer`.
        checksums: take one of every 256 KiB written, and compare when reading.

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
            # locked before it can be recognised as a store: no cleaner takes it for a dead one's
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
            NvmeError: foreign, of another format version, damaged, cut short, never flushed, or in
                use by another process.
        """
        handle = Handle(os.path.abspath(path), os.O_RDONLY, pads=True)
        try:
            layout = read_layout(handle.buffered, handle.path)
            need_whole(handle.buffered, handle.path, layout)
            if not lock(handle.buffered, shared=True):
                raise NvmeError(
                    f"{handle.path}: in use by {layout.maker}; wait for it to end, or let it "
                    "close(delete=False)"
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
        """Begin to fill `out` with an extent; its bytes must be the extent's.

        label: what errors call it, where it holds something else than its name says.
        """
        extent = self._find(name, out)
        blocks = Blocks(self._sums, extent, self._layout)
        return self._engine.submit_read(self._handle, out, extent.offset, label or name, blocks)

    def read_blocks(self, name: str, start: int, out: Tensor, label: str = "") -> Request:
        """Begin to fill `out` from byte `start` of an extent on: whole blocks, as of `covering`."""
        extent = self._layout.extents[name]
        stop = start + out.nbytes
        assert covering(start, stop, extent.nbytes) == (start, stop), f"{start}:{stop} of {name}"
        blocks = Blocks(self._sums, extent, self._layout)
        at = extent.offset + start
        return self._engine.submit_read(self._handle, out, at, label or name, blocks)

    def write(self, name: str, tensor: Tensor, label: str = "") -> Request:
        """Begin to write an extent from `tensor`; its bytes must be the extent's."""
        extent = self._find(name, tensor)
        if not self.can_write:
            raise NvmeError(f"{self.path}: open for reading; {name} cannot be written here")
        blocks = Blocks(self._sums, extent, self._layout)
        return self._engine.submit_write(self._handle, tensor, extent.offset, label or name, blocks)

    def place(self, name: str) -> tuple[mmap.mmap, int, int]:
        """Return (mapping of the whole file, offset, bytes) of an extent.

        The mapping has a descriptor of its own: it would keep the file's lock where it outlives the
        store, or is inherited by a fork.
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
        """Take the checksums of an extent from what was written past this store."""
        extent = self._find(name, content)
        view, _ = bytes_of(content, self.path, name)
        Blocks(self._sums, extent, self._layout).after_write(extent.offset, view)

    def _find(self, name: str, tensor: Tensor) -> Extent:
        extent = self._layout.extents.get(name)
        if extent is None:
            near = get_close_matches(name, self._layout.extents, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise NvmeError(f"{self.path} has no extent {name!r}{hint}")
        if isinstance(tensor, Tensor) and tensor.nbytes != extent.nbytes:
            raise NvmeError(
                f"{self.path}: {name} has {sized(extent.nbytes)} but the tensor "
                f"{tensor.dtype}{list(tensor.shape)} has {sized(tensor.nbytes)}; give one of its "
                "size"
            )
        return extent

    def wait(self) -> None:
        """Wait until nothing is under way; raise the first fault that was not waited for."""
        self._engine.wait(self._handle)

    def flush(self) -> None:
        """Wait, make the device hold everything, and write the checksums beside it."""
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

    # -- ended ------------------------------------------------------------------------------
    def close(self, delete: bool = True) -> None:
        """Wait for what is under way and close; the file goes, or stays to be opened again.

        Raises:
            NvmeError: a request failed and was not waited for, or the file cannot be kept.
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
        if kind is not None and not self._handle.is_closed:  # that exception is the one to see
            self._engine.drain(self._handle)
            self._handle.failed.clear()
        self.close()

    @property
    def extents(self) -> dict[str, int]:
        """Bytes of every extent, by name."""
        return dict(self._layout.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file, header and checksums included."""
        return self._layout.nbytes

    @property
    def is_direct(self) -> bool:
        """Say whether transfers go past the page cache."""
        return self._handle.is_direct


def _unlink(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)


# -- A store's extents as tensors in memory: what users look at while the schedule moves bytes past
# The tensor is a shared mapping of the extent's place in the file, so reading it always gives what
# the file holds, and holds no memory that the system cannot take back. The schedule reads and
# writes the same bytes by requests, directly. The kernel keeps the two in order: a direct read
# writes dirty pages out first, a direct write drops the pages that it makes outdated. What was
# written through the mapping has no checksum until `settle`.


class Mapped:
    """One extent as a tensor of bytes, and whether it was written through that.

    is_written: whether it has ever been given content; until then it is zeros.
    """

    def __init__(self, store: NvmeStore, name: str) -> None:
        self._store, self._name = store, name
        self._map, offset, nbytes = store.place(name)
        with torch.inference_mode(False):
            self.memory = (  # a storage of its own: copying it copies no other extent
                torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
                if nbytes
                else torch.empty(0, dtype=torch.uint8)
            )
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE  # of the system, which may be larger
        self._pages = begin, up(offset + nbytes) - begin
        self.is_written = False
        self._version = version_of(self.memory)

    @property
    def is_settled(self) -> bool:
        """Whether nothing was written through it since `settle`, as far as torch counts."""
        return version_of(self.memory) == self._version

    def settle(self) -> None:
        """Take the checksums of what the tensor holds, and write it out.

        Raises:
            NvmeError: the device does not take it; names the file and the extent.
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
        """Give back the memory in which pages of the file lie; their content stays."""
        self._map.madvise(mmap.MADV_DONTNEED, *self._pages)
