"""How ranks find their host's board, and how hosts compare notes through the store.

The ranks of one host share a file in memory; its name travels through the store once. Where the
world spans hosts, the first rank of each (its leader) posts what its host is about to do and reads
the other hosts': as many messages a call as there are hosts, not ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from zerofx.comm.board import ABSENT, ROW_BYTES, Entry, MemoryBoard
from zerofx.comm.meeting import BoundedStore, Meeting, store_errors, store_gone
from zerofx.errors import DesyncError

_BOOT = "/proc/sys/kernel/random/boot_id"
_SHARED_MEMORY = "/dev/shm"
_LOOK_S = 1.0  # how often the store is asked whether the world is broken
_CHECK_S = 0.1  # how often a rank that waits for the others' boards looks whether they still come


def host_key() -> str:
    """Name what must be equal for ranks to share memory and see each other's processes."""
    parts = [socket.gethostname()]
    if os.path.exists(_BOOT):
        with open(_BOOT) as boot:
            parts.append(boot.read().strip())
    if os.path.exists("/proc/self/ns/pid"):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


@dataclass(frozen=True)
class Break:
    """A call that a rank broke off after it had launched so many collectives, and why.

    is_last: the rank makes no further call.
    """

    rank: int
    call: int
    launched: int
    what: str
    reason: str
    is_last: bool = False


class HostLink:
    """One host's side of the comparison between hosts; `hosts` lists each host's ranks."""

    def __init__(self, store: Any, board: MemoryBoard, hosts: list[list[int]], host: int) -> None:
        self._store = store
        self._hosts = hosts
        self._host = host
        self._board = board
        self._verdicts = board.extra_row()
        self._failure: str | None = None
        self._looked = 0.0
        self._breaks: dict[int, Break] = {}
        self._read_breaks = 0
        self._beats = 0
        self.is_leader = board.rank == 0

    def post(self, call: int, groups: dict[Entry, list[int]]) -> None:
        """Post what the ranks of this host announced at `call`; drop what all have read."""
        rows, said = [], set()
        for entry, ranks in groups.items():  # other graphs do not make other texts
            texts = None if entry.texts_hash in said else (entry.what, entry.digest, entry.steps)
            said.add(entry.texts_hash)
            rows.append([entry.key.hex(), ranks, texts])
        with store_errors():
            self._store.set(self._key(call, self._host), json.dumps(rows))
            if call > 2:
                self._store.delete_key(self._key(call - 2, self._host))

    def have_all(self, call: int) -> bool:
        """Return whether every host has posted `call`."""
        with store_errors():
            return self._store.check([self._key(call, host) for host in range(len(self._hosts))])

    def absent(self, call: int) -> str:
        """Name the ranks of the hosts that have not posted `call`."""
        with store_errors():
            late = [
                ranks
                for host, ranks in enumerate(self._hosts)
                if not self._store.check([self._key(call, host)])
            ]
        return f"a rank of host {' or '.join(str(ranks) for ranks in late)}"

    def read(self, call: int) -> dict[Entry, list[int]]:
        """Return who announced what at `call`, over all hosts.

        Raises:
            DesyncError: a host that had come has given up since.
        """
        groups: dict[Entry, list[int]] = {}
        with store_errors():
            keys = [self._key(call, host) for host in range(len(self._hosts))]
            *texts, failure = self._store.multi_get([*keys, "failure"])
        if failure:
            raise DesyncError(failure.decode())
        for text in texts:
            said: dict[bytes, list[str]] = {}
            for packed, ranks, texts in json.loads(text):
                key = bytes.fromhex(packed)
                what, digest, steps = said.setdefault(key[:16], texts)
                entry = Entry(call, what, digest, key, steps)
                groups.setdefault(entry, []).extend(ranks)
        return groups

    def tell(self, call: int, verdict: str) -> None:
        """Let the other ranks of this host know how the hosts compared at `call`."""
        self._verdicts.post(call, verdict, "")

    def told(self, call: int) -> str | None:
        """Return what the leader told of `call`, None while it has not."""
        entry = self._board.entry(self._board.size, call)
        return entry.what if entry is not None else None

    def post_failure(self, message: str) -> None:
        """Let the other hosts know that the world is broken; the first message stays."""
        with contextlib.suppress(RuntimeError):  # without a store they see it break by themselves
            self._store.compare_set("failure", "", message)

    def failure(self) -> str | None:
        """Return what a host posted, if any."""
        self._look()
        return self._failure

    def post_break(self, broken: Break) -> None:
        """Let the other hosts know that a rank of this one broke off a call."""
        with contextlib.suppress(RuntimeError):  # `failure` reports a store that is gone
            number = self._store.add("breaks", 1)
            self._store.set(f"break/{number}", json.dumps(dataclasses.astuple(broken)))

    def breaks(self) -> list[Break]:
        """Return the last call that each rank broke off."""
        self._look()
        return list(self._breaks.values())

    def beat(self) -> None:
        """Give a sign of life from a busy rank."""
        with contextlib.suppress(RuntimeError):  # `failure` reports a store that is gone
            self._store.add("beats", 1)

    def beats(self) -> int:
        """Return how many signs of life the busy ranks of all hosts have given."""
        self._look()
        return self._beats

    def _look(self) -> None:
        """Ask the store, at most once a second, what the other hosts have to say."""
        now = time.monotonic()
        if self._failure is not None or now - self._looked <= _LOOK_S:
            return
        self._looked = now
        try:
            self._failure = self._store.get("failure").decode() or None
            self._beats = self._store.add("beats", 0)
            while self._store.check([f"break/{self._read_breaks + 1}"]):
                self._read_breaks += 1
                broken = Break(*json.loads(self._store.get(f"break/{self._read_breaks}")))
                self._breaks[broken.rank] = broken
        except RuntimeError as error:
            self._failure = f"{store_gone()}: {error}"

    def post_progress(self, launched: dict[int, int]) -> None:
        """Post how many collectives each rank of this host has launched."""
        with contextlib.suppress(RuntimeError):  # `failure` reports a store that is gone
            self._store.set(f"progress/{self._host}", json.dumps(launched))

    def progress(self) -> dict[int, int]:
        """Return how many collectives each rank had launched when its host last posted."""
        keys = [f"progress/{host}" for host in range(len(self._hosts))]
        with store_errors():
            texts = [self._store.get(key) for key in keys if self._store.check([key])]
        return {int(rank): n for text in texts for rank, n in json.loads(text).items()}

    @staticmethod
    def _key(call: int, host: int) -> str:
        return f"call/{call}/{host}"


@dataclass(frozen=True)
class Neighbours:
    """The board of this rank's host, which rank each row is, and the link to other hosts."""

    board: MemoryBoard
    ranks: list[int]
    link: HostLink | None


def meet(meeting: Meeting, host: str | None = None) -> Neighbours:
    """Bring the ranks of a meeting to their boards.

    Raises:
        DesyncError: a rank did not come within the meeting's limit, or has raised; names it.
    """
    store, rank, size = meeting.store, meeting.rank, meeting.size
    if rank == 0:
        store.set("failure", "")  # it is there once all ranks have shared their hosts
    keys = meeting.share("host", host or host_key())
    meeting.hosts.update({other: keys[other].partition("/")[0] for other in range(size)})
    ranks = [other for other in range(size) if keys[other] == keys[rank]]
    hosts = list(dict.fromkeys(keys))
    num_bytes = (len(ranks) + 1) * ROW_BYTES  # one more row, for the leader's verdicts
    path = _make_file(store, ranks[0], num_bytes) if rank == ranks[0] else None
    try:
        board = _sign_in(meeting, ranks, path or meeting.get(f"board/{ranks[0]}", ranks[0]))
    finally:
        if path is not None:
            os.unlink(path)  # all have it open; nothing is left behind, however they end
    if len(hosts) == 1:
        return Neighbours(board, ranks, None)
    members = [[other for other in range(size) if keys[other] == key] for key in hosts]
    link = HostLink(store.raw, board, members, hosts.index(keys[rank]))
    return Neighbours(board, ranks, link)


def _sign_in(meeting: Meeting, ranks: list[int], path: str) -> MemoryBoard:
    """Open the board of this host, and return it once all its ranks have."""
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), (len(ranks) + 1) * ROW_BYTES)
    board = MemoryBoard(shared, ranks.index(meeting.rank), len(ranks))
    board.attach()
    looked = started = time.monotonic()
    while absent := [other for row, other in enumerate(ranks) if board.state(row) == ABSENT]:
        now = time.monotonic()
        if now - looked > _CHECK_S:
            looked = now
            meeting.check()
        if now - started > meeting.limit_s:
            raise meeting.fail(
                f"{meeting.name(absent)} did not reach rank {meeting.rank}'s board within "
                f"{meeting.limit_s:g} s (ZEROFX_TIMEOUT_S)"
            )
        time.sleep(1e-3)
    return board


def _make_file(store: BoundedStore, leader: int, num_bytes: int) -> str:
    """Make the file of a board, readable by this user only, and post its name."""
    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    handle, path = tempfile.mkstemp(prefix="zerofx-board-", dir=folder)
    os.ftruncate(handle, num_bytes)
    os.close(handle)
    store.set(f"board/{leader}", path)
    return path
