"""A store's extents as tensors in memory: what users look at while the schedule moves bytes past.

The tensor is a shared mapping of the extent's place in the file, so reading it always gives what
the file holds, and holds no memory that the system cannot take back. The schedule reads and writes
the same bytes by requests, directly. The kernel keeps the two in order: a direct read writes dirty
pages out first, a direct write drops the pages that it makes outdated. What was written through the
mapping has no checksum until `settle`.
"""

from __future__ import annotations

import mmap

import torch

from zerofx.compat.tensors import version_of
from zerofx.nvme.aligned import up
from zerofx.nvme.faults import path_error
from zerofx.nvme.store import NvmeStore


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
