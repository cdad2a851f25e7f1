"""The format of a store's file: layout, version and checksums.

    header: prefix and the layout as JSON | state: one page | one checksum per block | extents

Each part begins at a page. While a store is in use, only its process can interpret the file. After
`flush`, any process can read it back, and each block is verified by its checksum.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE, up
from zerofx.nvme.checksum import BLOCK_BYTES
from zerofx.nvme.faults import path_error, sized

MAGIC, FORMAT = b"ZFXNVME\n", 1
_PREFIX = struct.Struct("<8sIIQ")  # magic, format version, crc32 of the layout, its bytes
_STATE = struct.Struct("<8sIIII")  # magic, is kept, flushes, crc32 of the checksums, own crc32
_STATE_MAGIC = b"ZFXSTATE"
_MAX_LAYOUT_BYTES = 1 << 30  # a longer layout was not written by zerofx


@dataclass(frozen=True)
class Extent:
    """The place of a named value: `nbytes` at `offset`, with checksums from `first_block` on."""

    offset: int
    nbytes: int
    first_block: int

    @property
    def num_blocks(self) -> int:
        return -(-self.nbytes // BLOCK_BYTES)


def check_sizes(sizes: Mapping[str, int], label: str) -> None:
    """Check that extents are a mapping of names to sizes."""
    for name, nbytes in sizes.items():
        is_size = isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= 0
        if not isinstance(name, str) or not is_size:
            raise NvmeError(
                f"{label}: extent {name!r} of {nbytes!r} bytes is not valid. Give names as strings "
                "and sizes as whole numbers of bytes."
            )


@dataclass(frozen=True)
class Layout:
    """The extents of a file, and who made it."""

    sizes: Mapping[str, int]
    label: str
    has_checksums: bool
    made: Mapping[str, Any]  # pid, host, boot, time

    @cached_property
    def text(self) -> bytes:
        """The layout as stored in the file; offsets count from the first extent."""
        begin, extents = 0, []
        for name, nbytes in self.sizes.items():
            extents.append([name, begin, nbytes])
            begin += up(nbytes)
        fields = {"label": self.label, "made": dict(self.made), "block_bytes": BLOCK_BYTES}
        return json.dumps(
            fields | {"has_checksums": self.has_checksums, "extents": extents}
        ).encode()

    @property
    def state_at(self) -> int:
        return up(_PREFIX.size + len(self.text))

    @property
    def sums_at(self) -> int:
        return self.state_at + PAGE

    @cached_property
    def num_blocks(self) -> int:
        return sum(-(-nbytes // BLOCK_BYTES) for nbytes in self.sizes.values())

    @property
    def data_at(self) -> int:
        return self.sums_at + up(8 * self.num_blocks)

    @cached_property
    def extents(self) -> dict[str, Extent]:
        """Extents by name, with their offsets in the file."""
        offset, block, extents = self.data_at, 0, {}
        for name, nbytes in self.sizes.items():
            extents[name] = Extent(offset, nbytes, block)
            offset, block = offset + up(nbytes), block + extents[name].num_blocks
        return extents

    @property
    def nbytes(self) -> int:
        """The size of the whole file in bytes."""
        return self.data_at + sum(up(nbytes) for nbytes in self.sizes.values())

    @property
    def maker(self) -> str:
        """The maker of the file, for messages."""
        return f"process {self.made['pid']} on {self.made['host']}, at {self.made['time']}"

    def encode(self) -> bytes:
        """Return the header, padded to whole pages."""
        prefix = _PREFIX.pack(MAGIC, FORMAT, zlib.crc32(self.text), len(self.text))
        return (prefix + self.text).ljust(self.state_at, b"\0")


@dataclass(frozen=True)
class State:
    """The state of a file: whether it is kept, how often it was flushed, and its checksums."""

    is_kept: bool = False
    num_flushes: int = 0
    crc_of_sums: int = 0

    def encode(self) -> bytes:
        """Return the state as one page."""
        fields = _STATE_MAGIC, int(self.is_kept), self.num_flushes, self.crc_of_sums
        crc = zlib.crc32(_STATE.pack(*fields, 0))
        return _STATE.pack(*fields, crc).ljust(PAGE, b"\0")

    @classmethod
    def decode(cls, page: bytes) -> State | None:
        """Read a state from its page; None if it is damaged."""
        if len(page) < PAGE:
            return None
        _, is_kept, num_flushes, crc_of_sums, _ = _STATE.unpack_from(page)
        state = cls(bool(is_kept), num_flushes, crc_of_sums)
        return state if state.encode() == page else None


def is_ours(fd: int) -> bool:
    """Return whether an open file begins like a store."""
    return os.pread(fd, len(MAGIC), 0) == MAGIC


def read_layout(fd: int, path: str) -> Layout:
    """Return the layout of an open file.

    Raises:
        NvmeError: the file is foreign or of another format version, or its header is damaged or
            truncated; says which of them and at which offset.
    """
    try:
        prefix = os.pread(fd, _PREFIX.size, 0)
        actual = os.fstat(fd).st_size
    except OSError as error:
        raise path_error("cannot read the header of", path, error) from error
    if prefix[: len(MAGIC)] != MAGIC:
        raise NvmeError(
            f"{path}: the 8 bytes at offset 0 are {prefix[:8]!r}, not {MAGIC!r}: not a store of "
            "zerofx. Give the path of one."
        )
    if len(prefix) < _PREFIX.size:
        raise NvmeError(f"{path}: {_cut(actual, _PREFIX.size)}.")
    _, version, crc, length = _PREFIX.unpack(prefix)
    if version != FORMAT:
        age = "an older" if version < FORMAT else "a newer"
        raise NvmeError(
            f"{path}: format version {version} at offset 8, of {age} zerofx. This one reads "
            f"version {FORMAT}. Read it with the zerofx that wrote it."
        )
    text = os.pread(fd, length, _PREFIX.size) if length <= _MAX_LAYOUT_BYTES else b""
    if len(text) < length <= actual - _PREFIX.size or zlib.crc32(text) != crc:
        if length <= _MAX_LAYOUT_BYTES and _PREFIX.size + length > actual:
            raise NvmeError(f"{path}: {_cut(actual, _PREFIX.size + length)}.")
        raise NvmeError(
            f"{path}: the header ({length} bytes at offset {_PREFIX.size}) does not match its "
            "checksum: the file is damaged. Write it again."
        )
    return _parse(text)


def need_whole(fd: int, path: str, layout: Layout) -> None:
    """Raise if a file is shorter than its layout says."""
    actual = os.fstat(fd).st_size
    if actual < layout.nbytes:
        missing = [n for n, e in layout.extents.items() if e.offset + e.nbytes > actual]
        first = f". {missing[0]} is the first incomplete extent" if missing else ""
        raise NvmeError(f"{path}: {_cut(actual, layout.nbytes)}{first}.")


def _cut(actual: int, expected: int) -> str:
    return f"truncated at offset {actual}: {sized(expected)} were written. Write it again"


def _parse(text: bytes) -> Layout:
    fields = json.loads(text)
    sizes = {name: nbytes for name, _, nbytes in fields["extents"]}
    layout = Layout(sizes, fields["label"], fields["has_checksums"], fields["made"])
    assert layout.text == text, "the checksum is right, so this version wrote it"
    return layout
