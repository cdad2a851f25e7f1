"""The checksums of a store's blocks: taken while writing, compared while reading."""

from __future__ import annotations

import os
import zlib

import numpy as np

from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE, Bytes
from zerofx.nvme.checksum import BLOCK_BYTES, checksums
from zerofx.nvme.faults import Damaged
from zerofx.nvme.handle import Handle
from zerofx.nvme.header import Extent, Layout, State


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
