"""A notice board in memory shared by the ranks of one host: what each rank does, read in 1 us.

Every rank writes its own row and reads the others'. A row holds the rank's process, whether it has
left and why, how many collectives it has launched, its last two calls, whether an exception broke
one of them off, and what it is busy with. Two calls suffice: a rank posts call n + 2 only after it
has read call n + 1 of all ranks, and each rank posts n + 1 only after it has read n of all.

A row of ROW_BYTES: eight words of 8 bytes; three texts (length 2 bytes) of REASON_BYTES,
BREAK_BYTES and BUSY_BYTES; two entries of ENTRY_BYTES: call number (8), key (32), lengths
(2 + 2 + 2), and three texts: what, steps, digest. A key is the hash of these texts (16), of the
call's input sizes (8) and of the captured graph (8).
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

REASON_BYTES, BREAK_BYTES, BUSY_BYTES, ENTRY_BYTES = 1984, 512, 512, 4096
_LEVEL = 1 << 24  # more than the number of launches of any one call
_PID, _STARTED, _STATE, _LAUNCHED, _CALL, _BEATS, _BROKEN = range(7)  # the words of a row
_WORDS_BYTES = 8 * (_BROKEN + 2)  # there are two broken calls, as there are two entries
_REASON = _WORDS_BYTES, REASON_BYTES
_BREAK = _WORDS_BYTES + REASON_BYTES, BREAK_BYTES
_BUSY = _WORDS_BYTES + REASON_BYTES + BREAK_BYTES, BUSY_BYTES
_ENTRIES = _WORDS_BYTES + REASON_BYTES + BREAK_BYTES + BUSY_BYTES
ROW_BYTES = _ENTRIES + 2 * ENTRY_BYTES
_KEY, _LENGTHS, _TEXT = 8, 40, 46  # offsets inside an entry
_STEPS_BYTES = 1024  # at most, per entry
NO_GRAPH = bytes(16)  # the hashes of a call that runs no graph
ABSENT, PRESENT, LEFT, FAILED = range(4)


@dataclass(frozen=True)
class Entry:
    """A rank's announcement of its next call: number, description, and digest.

    steps: the optimizer steps that the rank has taken since its last call.
    """

    call: int
    what: str
    digest: str
    key: bytes = b""
    steps: str = ""

    @property
    def texts_hash(self) -> bytes:
        """The hash of the texts, which must be equal on all ranks."""
        return self.key[:16]

    @property
    def sizes_hash(self) -> bytes:
        """The hash of the sizes of the call's inputs, in which ranks may differ."""
        return self.key[16:24]

    @property
    def graph_hash(self) -> bytes:
        """The hash of the graph, which must be equal on all ranks with equal input sizes."""
        return self.key[24:32]


@lru_cache(maxsize=256)
def entry_key(what: str, digest: str, graph: bytes = NO_GRAPH, steps: str = "") -> bytes:
    """Return the 32-byte key of a call: hashes of its texts (16), input sizes (8) and graph (8)."""
    texts = f"{what}\0{digest}\0{steps}".encode(errors="surrogatepass")
    return hashlib.blake2b(texts, digest_size=16).digest() + graph


@lru_cache(maxsize=256)
def _packed(what: str, digest: str, graph: bytes, steps: str) -> bytes:
    """Return an entry without its call number; its texts are cut to fit."""
    first, second = (
        what.encode(errors="backslashreplace")[:512],
        steps.encode(errors="backslashreplace")[:_STEPS_BYTES],
    )
    third = digest.encode(errors="backslashreplace")[
        : ENTRY_BYTES - _TEXT - len(first) - len(second)
    ]
    lengths = struct.pack("<HHH", len(first), len(second), len(third))
    return entry_key(what, digest, graph, steps) + lengths + first + second + third


def process_started(pid: int) -> int:
    """Return the start time of process `pid` in clock ticks; 0 if it has ended or is a zombie."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Return whether the process that started then still exists, even if stopped.

    Also returns True if the system cannot tell, for example because no file descriptor is left.
    That is not a death, and the limit of a wait for the process still applies.
    """
    try:
        return process_started(pid) == started
    except OSError:
        return True


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/<pid>/stat from the state on; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # the latter: it was reaped after the open
        return []


class MemoryBoard:
    """The rows of `size` ranks in one shared `buffer`; this rank writes row `rank`."""

    def __init__(self, buffer: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._owner = os.getpid()
        self._bytes = memoryview(buffer)
        self._words = self._bytes.cast("Q")
        self._word = rank * ROW_BYTES // 8
        self._launched = self._word + _LAUNCHED
        self._written: list[tuple[str, str, bytes, str] | None] = [None, None]

    def extra_row(self) -> MemoryBoard:
        """Return a writer for the row after those of the ranks, which the buffer must contain."""
        return MemoryBoard(self._bytes, self.size, self.size)

    def attach(self) -> None:
        """Sign in, so that the other ranks can tell whether this process is alive."""
        self._words[self._word + _PID] = os.getpid()
        self._words[self._word + _STARTED] = process_started(os.getpid())
        self._words[self._word + _STATE] = PRESENT

    def post(
        self, call: int, what: str, digest: str, graph: bytes = NO_GRAPH, steps: str = ""
    ) -> None:
        """Announce this rank's next call; the call number is written last."""
        base = self.rank * ROW_BYTES + self._entry(call)
        entry = what, digest, graph, steps
        if self._written[call & 1] != entry:
            packed = _packed(*entry)
            self._words[base // 8] = 0
            self._bytes[base + _KEY : base + _KEY + len(packed)] = packed
            self._written[call & 1] = entry
        self._words[base // 8] = call
        self._words[self._word + _CALL] = call

    def has(self, rank: int, call: int, key: bytes) -> bool | None:
        """Return whether `rank` posted `key` at `call`; None if it has posted nothing yet."""
        base = rank * ROW_BYTES + self._entry(call)
        if self._words[base // 8] != call:
            return None
        return self._bytes[base + _KEY : base + _LENGTHS] == key

    def key(self, rank: int, call: int) -> bytes:
        """Return the key that `rank` has posted at `call`; it must have posted one."""
        base = rank * ROW_BYTES + self._entry(call)
        return bytes(self._bytes[base + _KEY : base + _LENGTHS])

    def entry(self, rank: int, call: int) -> Entry | None:
        """Return the entry that `rank` posted at `call`; None if it is not there (any more)."""
        base = rank * ROW_BYTES + self._entry(call)
        if call == 0 or self._words[base // 8] != call:
            return None
        raw = bytes(self._bytes[base : base + ENTRY_BYTES])
        texts, at = [], _TEXT
        for length in struct.unpack_from("<HHH", raw, _LENGTHS):
            texts.append(raw[at : at + length].decode(errors="replace"))
            at += length
        what, steps, digest = texts
        return Entry(call, what, digest, raw[_KEY:_LENGTHS], steps)

    def launch(self) -> int:
        """Count a collective that this rank launches; return the new count."""
        count = self._words[self._launched] + 1
        self._words[self._launched] = count
        return count

    def level(self) -> None:
        """Raise this rank's count to a value that is equal on all ranks after unequal launches."""
        self._words[self._launched] = (self._words[self._launched] // _LEVEL + 1) * _LEVEL

    def launched(self, rank: int) -> int:
        """Return the number of collectives that `rank` has launched."""
        return self._words[rank * ROW_BYTES // 8 + _LAUNCHED]

    def call(self, rank: int) -> int:
        """Return the number of the last call that `rank` posted."""
        return self._words[rank * ROW_BYTES // 8 + _CALL]

    def leave(self, reason: str, state: int = LEFT) -> None:
        """Record why this rank makes no further call; the first reason is kept."""
        if self._words[self._word + _STATE] >= LEFT or os.getpid() != self._owner:
            return  # a forked child that ends, such as a loader's worker, is not this rank
        self._write(_REASON, reason)
        self._words[self._word + _STATE] = state

    def state(self, rank: int) -> int:
        """Return ABSENT (not signed in yet), PRESENT, LEFT or FAILED."""
        return self._words[rank * ROW_BYTES // 8 + _STATE]

    def reason(self, rank: int) -> str:
        """Return why `rank` left."""
        return self._read(rank, _REASON)

    def break_off(self, call: int, reason: str) -> None:
        """Record that an exception on this rank ended `call` before its last collective."""
        self._write(_BREAK, reason)
        self._words[self._word + _BROKEN + (call & 1)] = call

    def broke_off(self, rank: int, call: int) -> str | None:
        """Return why `rank` broke off `call`, one of its last two; None if it did not."""
        word = rank * ROW_BYTES // 8 + _BROKEN + (call & 1)
        return self._read(rank, _BREAK) if call and self._words[word] == call else None

    def set_busy(self, what: str) -> None:
        """Record what keeps this rank from its next call; empty if nothing does."""
        self._write(_BUSY, what)

    def busy(self, rank: int) -> str:
        """Return what `rank` is busy with; empty if nothing."""
        return self._read(rank, _BUSY)

    def beat(self) -> None:
        """Give a sign of life while busy."""
        self._words[self._word + _BEATS] += 1

    def beats(self, rank: int) -> int:
        """Return the number of signs of life that `rank` has given."""
        return self._words[rank * ROW_BYTES // 8 + _BEATS]

    def pid(self, rank: int) -> int:
        return self._words[rank * ROW_BYTES // 8 + _PID]

    def is_alive(self, rank: int) -> bool:
        """Return whether the process that signed in as `rank` still exists; see `is_running`."""
        word = rank * ROW_BYTES // 8
        return is_running(self._words[word + _PID], self._words[word + _STARTED])

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of `rank` is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        try:
            return _stat(self.pid(rank))[:1] in ([b"T"], [b"t"])
        except OSError:  # as in `is_alive`
            return False

    def _write(self, place: tuple[int, int], text: str) -> None:
        raw = text.encode(errors="backslashreplace")[: place[1] - 2]
        base = self.rank * ROW_BYTES + place[0]
        self._bytes[base : base + 2 + len(raw)] = struct.pack("<H", len(raw)) + raw

    def _read(self, rank: int, place: tuple[int, int]) -> str:
        base = rank * ROW_BYTES + place[0]
        (length,) = struct.unpack_from("<H", self._bytes, base)
        return bytes(self._bytes[base + 2 : base + 2 + length]).decode(errors="replace")

    @staticmethod
    def _entry(call: int) -> int:
        return _ENTRIES + (call & 1) * ENTRY_BYTES
