"""The ranks of a host and the links between hosts: boards are found, and hosts are compared.

The ranks of one host share a file in memory; its name is sent through the store once. If the world
spans several hosts, the first rank of each (its leader) posts the next call of its host and reads
those of the other hosts. Each call takes as many messages as there are hosts, not ranks.
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
from zerofx.errors import DesyncError, as_sentence

_BOOT = "/proc/sys/kernel/random/boot_id"
_SHARED_MEMORY = "/dev/shm"
_LOOK_S = 1.0  # how often to ask the store whether the world is broken
_CHECK_S = 0.1  # how often a rank that waits for the board checks whether the others still start


def host_key() -> str:
    """Return a key that is equal for ranks that share memory and see each other's processes."""
    parts = [socket.gethostname()]
    if os.path.exists(_BOOT):
        with open(_BOOT) as boot:
            parts.append(boot.read().strip())
    if os.path.exists("/proc/self/ns/pid"):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


@dataclass(frozen=True)
class Break:
    """A call that a rank broke off, after how many launched collectives, and why.

    is_last: the rank makes no further call.
    """

    rank: int
    call: int
    launched: int
    what: str
    reason: str
    is_last: bool = False


class HostLink:
    """One host's side of the comparison between hosts; `hosts` lists the ranks of each host."""

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
        """Post what this host's ranks announced at `call`; delete entries that all have read."""
        rows, said = [], set()
        for entry, ranks in groups.items():  # entries that differ in the graph share their texts
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
        """Return the announcements of all hosts at `call`, each with its ranks.

        Raises:
            DesyncError: a host that had arrived has given up since.
        """
        groups: dict[Entry, list[int]] = {}
        with store_errors():
            keys = [self._key(call, host) for host in range(len(self._hosts))]
            *texts, failure = self._store.multi_get([*keys, "failure"])
        if failure:
            raise DesyncError(as_sentence(failure.decode()))
        for text in texts:
            said: dict[bytes, list[str]] = {}
            for packed, ranks, texts in json.loads(text):
                key = bytes.fromhex(packed)
                what, digest, steps = said.setdefault(key[:16], texts)
                entry = Entry(call, what, digest, key, steps)
                groups.setdefault(entry, []).extend(ranks)
        return groups

    def tell(self, call: int, verdict: str) -> None:
        """Tell the other ranks of this host the result of comparing the hosts at `call`."""
        self._verdicts.post(call, verdict, "")

    def told(self, call: int) -> str | None:
        """Return what the leader told about `call`; None if it has told nothing yet."""
        entry = self._board.entry(self._board.size, call)
        return entry.what if entry is not None else None

    def post_failure(self, message: str) -> None:
        """Tell the other hosts that the world is broken; the first message is kept."""
        with contextlib.suppress(RuntimeError):  # without a store, they notice by themselves
            self._store.compare_set("failure", "", message)

    def failure(self) -> str | None:
        """Return the failure that a host posted, if any."""
        self._look()
        return self._failure

    def post_break(self, broken: Break) -> None:
        """Tell the other hosts that a rank of this one broke off a call."""
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
        """Return the number of signs of life that the busy ranks of all hosts have given."""
        self._look()
        return self._beats

    def _look(self) -> None:
        """Read the news of the other hosts from the store, at most once per second."""
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
        """Post the number of collectives that each rank of this host has launched."""
        with contextlib.suppress(RuntimeError):  # `failure` reports a store that is gone
            self._store.set(f"progress/{self._host}", json.dumps(launched))

    def progress(self) -> dict[int, int]:
        """Return the number of collectives of each rank when its host last posted it."""
        keys = [f"progress/{host}" for host in range(len(self._hosts))]
        with store_errors():
            texts = [self._store.get(key) for key in keys if self._store.check([key])]
        return {int(rank): n for text in texts for rank, n in json.loads(text).items()}

    @staticmethod
    def _key(call: int, host: int) -> str:
        return f"call/{call}/{host}"


@dataclass(frozen=True)
class Neighbours:
    """The board of this rank's host, the rank of each row, and the link to other hosts."""

    board: MemoryBoard
    ranks: list[int]
    link: HostLink | None


def meet(meeting: Meeting, host: str | None = None) -> Neighbours:
    """Connect the ranks of a meeting to the boards of their hosts.

    Raises:
        DesyncError: a rank did not arrive within the meeting's limit, or has raised; names it.
    """
    store, rank, size = meeting.store, meeting.rank, meeting.size
    if rank == 0:
        store.set("failure", "")  # it exists once all ranks have shared their hosts
    keys = meeting.share("host", host or host_key())
    meeting.elsewhere.update(other for other in range(size) if keys[other] != keys[rank])
    meeting.hosts.update({other: keys[other].partition("/")[0] for other in range(size)})
    ranks = [other for other in range(size) if keys[other] == keys[rank]]
    hosts = list(dict.fromkeys(keys))
    num_bytes = (len(ranks) + 1) * ROW_BYTES  # one more row, for the leader's verdicts
    path = _make_file(store, ranks[0], num_bytes) if rank == ranks[0] else None
    try:
        board = _sign_in(meeting, ranks, path or meeting.get(f"board/{ranks[0]}", ranks[0]))
    finally:
        if path is not None:
            os.unlink(path)  # all ranks have it open, so nothing is left however they end
    if len(hosts) == 1:
        return Neighbours(board, ranks, None)
    members = [[other for other in range(size) if keys[other] == key] for key in hosts]
    link = HostLink(store.raw, board, members, hosts.index(keys[rank]))
    return Neighbours(board, ranks, link)


def _sign_in(meeting: Meeting, ranks: list[int], path: str) -> MemoryBoard:
    """Open the board of this host, and return it once all ranks of the host have opened it."""
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
                f"{meeting.limit_s:g} s (ZEROFX_TIMEOUT_S)."
            )
        time.sleep(1e-3)
    return board


def _make_file(store: BoundedStore, leader: int, num_bytes: int) -> str:
    """Create the file of a board, readable by this user only, and post its name."""
    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    handle, path = tempfile.mkstemp(prefix="zerofx-board-", dir=folder)
    os.ftruncate(handle, num_bytes)
    os.close(handle)
    store.set(f"board/{leader}", path)
    return path
