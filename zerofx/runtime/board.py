"""A notice board in memory that the ranks of one host share: what each is doing, read in 1 us.

Every rank writes its own row and reads the others'. A row holds the rank's process, whether it has
left and why, how many collectives it has launched, and its last two calls. Two suffice: a rank
posts call n + 2 only after it has read everybody's n + 1, which each posts after reading all n.

Row of ROW_BYTES: eight words of 8 bytes, REASON_BYTES of text, then two entries of ENTRY_BYTES:
call number (8), hash of the digest (16), lengths (2 + 2), the two texts.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ROW_BYTES, REASON_BYTES, ENTRY_BYTES = 8192, 1984, 3072
_HEADER_BYTES = 64
_PID, _STARTED, _STATE, _LAUNCHED, _CALL, _VERDICT = range(6)  # the words of a row
_HASH, _LENGTHS, _TEXT = 8, 24, 28  # offsets inside an entry
ABSENT, PRESENT, LEFT, FAILED = range(4)


@dataclass(frozen=True)
class Entry:
    """What a rank is about to do: its how-manieth call, in words, and what must be equal."""

    call: int
    what: str
    digest: str
    digest_hash: bytes = b""


@lru_cache(maxsize=1024)
def digest_hash(what: str, digest: str) -> bytes:
    """Return 16 bytes that stand for `what` and all of `digest`."""
    return hashlib.blake2b(f"{what}\0{digest}".encode(), digest_size=16).digest()


@lru_cache(maxsize=1024)
def _packed(what: str, digest: str) -> bytes:
    """Return an entry after its call number, its texts cut to fit."""
    first = what.encode()[:512]
    second = digest.encode()[: ENTRY_BYTES - _TEXT - len(first)]
    lengths = struct.pack("<HH", len(first), len(second))
    return digest_hash(what, digest) + lengths + first + second


def process_started(pid: int) -> int:
    """Return when the kernel started `pid` (clock ticks), 0 if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


class MemoryBoard:
    """The rows of `size` ranks in one shared `buffer`; this rank writes row `rank`."""

    def __init__(self, buffer: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._owner = os.getpid()
        self._bytes = memoryview(buffer)
        self._words = self._bytes.cast("Q")
        self._word = rank * ROW_BYTES // 8
        self._launched = self._word + _LAUNCHED
        self._written: list[tuple[str, str] | None] = [None, None]

    def extra_row(self) -> MemoryBoard:
        """Return a writer for the row behind the ranks' own, which the buffer must have."""
        return MemoryBoard(self._bytes, self.size, self.size)

    def attach(self) -> None:
        """Sign in: from here on the others can tell whether this process lives."""
        self._words[self._word + _PID] = os.getpid()
        self._words[self._word + _STARTED] = process_started(os.getpid())
        self._words[self._word + _STATE] = PRESENT

    def post(self, call: int, what: str, digest: str) -> None:
        """Announce this rank's next call; the call number is written last."""
        base = self.rank * ROW_BYTES + self._entry(call)
        if self._written[call & 1] != (what, digest):
            packed = _packed(what, digest)
            self._words[base // 8] = 0
            self._bytes[base + _HASH : base + _HASH + len(packed)] = packed
            self._written[call & 1] = (what, digest)
        self._words[base // 8] = call
        self._words[self._word + _CALL] = call

    def has(self, rank: int, call: int, digest_hash: bytes) -> bool | None:
        """Return whether `rank` posted `digest_hash` at `call`; None while it posted nothing."""
        base = rank * ROW_BYTES + self._entry(call)
        if self._words[base // 8] != call:
            return None
        return self._bytes[base + _HASH : base + _LENGTHS] == digest_hash

    def entry(self, rank: int, call: int) -> Entry | None:
        """Return what `rank` posted at `call`, None if it is not there (yet, or any more)."""
        base = rank * ROW_BYTES + self._entry(call)
        if call == 0 or self._words[base // 8] != call:
            return None
        raw = bytes(self._bytes[base : base + ENTRY_BYTES])
        first, second = struct.unpack_from("<HH", raw, _LENGTHS)
        what = raw[_TEXT : _TEXT + first].decode(errors="replace")
        text = raw[_TEXT + first : _TEXT + first + second].decode(errors="replace")
        return Entry(call, what, text, raw[_HASH:_LENGTHS])

    def launch(self) -> int:
        """Count a collective that this rank has launched; return how many it now is."""
        count = self._words[self._launched] + 1
        self._words[self._launched] = count
        return count

    def launched(self, rank: int) -> int:
        """Return how many collectives `rank` has launched."""
        return self._words[rank * ROW_BYTES // 8 + _LAUNCHED]

    def call(self, rank: int) -> int:
        """Return the number of the last call that `rank` posted."""
        return self._words[rank * ROW_BYTES // 8 + _CALL]

    def leave(self, reason: str, state: int = LEFT) -> None:
        """Write why this rank will not come again; the first reason stays."""
        if self._words[self._word + _STATE] >= LEFT or os.getpid() != self._owner:
            return  # a forked child (a loader's worker) that ends is not this rank
        text = reason.encode()[: REASON_BYTES - 2]
        base = self.rank * ROW_BYTES + _HEADER_BYTES
        self._bytes[base : base + 2 + len(text)] = struct.pack("<H", len(text)) + text
        self._words[self._word + _STATE] = state

    def state(self, rank: int) -> int:
        """Return ABSENT (not signed in yet), PRESENT, LEFT or FAILED."""
        return self._words[rank * ROW_BYTES // 8 + _STATE]

    def reason(self, rank: int) -> str:
        """Return why `rank` left."""
        base = rank * ROW_BYTES + _HEADER_BYTES
        (length,) = struct.unpack_from("<H", self._bytes, base)
        return bytes(self._bytes[base + 2 : base + 2 + length]).decode(errors="replace")

    def pid(self, rank: int) -> int:
        return self._words[rank * ROW_BYTES // 8 + _PID]

    def is_alive(self, rank: int) -> bool:
        """Return whether the process that signed in as `rank` still runs (stopped counts)."""
        word = rank * ROW_BYTES // 8
        return process_started(self._words[word + _PID]) == self._words[word + _STARTED]

    @staticmethod
    def _entry(call: int) -> int:
        return _HEADER_BYTES + REASON_BYTES + (call & 1) * ENTRY_BYTES
