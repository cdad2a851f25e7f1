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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerofx.errors import DesyncError
from zerofx.runtime.board import ABSENT, ROW_BYTES, Entry, MemoryBoard

_BOOT = "/proc/sys/kernel/random/boot_id"
_SHARED_MEMORY = "/dev/shm"
_STORE_GONE = "the store of the job no longer answers (the process that serves it has ended)"
_LOOK_S = 1.0  # how often the store is asked whether the world is broken


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
    """A call that a rank broke off after it had launched so many collectives, and why."""

    rank: int
    call: int
    launched: int
    what: str
    reason: str


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
        rows = [[e.what, e.digest, e.digest_hash.hex(), ranks] for e, ranks in groups.items()]
        with _store_errors():
            self._store.set(self._key(call, self._host), json.dumps(rows))
            if call > 2:
                self._store.delete_key(self._key(call - 2, self._host))

    def have_all(self, call: int) -> bool:
        """Return whether every host has posted `call`."""
        with _store_errors():
            return self._store.check([self._key(call, host) for host in range(len(self._hosts))])

    def absent(self, call: int) -> str:
        """Name the ranks of the hosts that have not posted `call`."""
        with _store_errors():
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
        with _store_errors():
            keys = [self._key(call, host) for host in range(len(self._hosts))]
            *texts, failure = self._store.multi_get([*keys, "failure"])
        if failure:
            raise DesyncError(failure.decode())
        for text in texts:
            for what, digest, digest_hash, ranks in json.loads(text):
                entry = Entry(call, what, digest, bytes.fromhex(digest_hash))
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
            self._failure = f"{_STORE_GONE}: {error}"

    def post_progress(self, launched: dict[int, int]) -> None:
        """Post how many collectives each rank of this host has launched."""
        with contextlib.suppress(RuntimeError):  # `failure` reports a store that is gone
            self._store.set(f"progress/{self._host}", json.dumps(launched))

    def progress(self) -> dict[int, int]:
        """Return how many collectives each rank had launched when its host last posted."""
        keys = [f"progress/{host}" for host in range(len(self._hosts))]
        with _store_errors():
            texts = [self._store.get(key) for key in keys if self._store.check([key])]
        return {int(rank): n for text in texts for rank, n in json.loads(text).items()}

    @staticmethod
    def _key(call: int, host: int) -> str:
        return f"call/{call}/{host}"


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Say what it means when the store no longer answers."""
    try:
        yield
    except RuntimeError as error:
        raise DesyncError(f"{_STORE_GONE}: {error}") from error


@dataclass(frozen=True)
class Neighbours:
    """The board of this rank's host, which rank each row is, and the link to other hosts."""

    board: MemoryBoard
    ranks: list[int]
    link: HostLink | None


def meet(store: Any, rank: int, size: int, limit_s: float, host: str | None = None) -> Neighbours:
    """Bring the `size` ranks that share `store` (and no others) to their boards.

    Raises:
        DesyncError: a rank of this host did not come within `limit_s`.
    """
    store.set(f"host/{rank}", host or host_key())
    if rank == 0:
        store.set("failure", "")
    keys = store.multi_get([f"host/{other}" for other in range(size)])
    ranks = [other for other in range(size) if keys[other] == keys[rank]]
    hosts = list(dict.fromkeys(keys))
    num_bytes = (len(ranks) + 1) * ROW_BYTES  # one more row, for the leader's verdicts
    path = _make_file(store, ranks[0], num_bytes) if rank == ranks[0] else None
    name = path or store.get(f"board/{ranks[0]}").decode()
    with open(name, "r+b") as file:
        board = MemoryBoard(mmap.mmap(file.fileno(), num_bytes), ranks.index(rank), len(ranks))
    board.attach()
    deadline = time.monotonic() + limit_s
    for row, other in enumerate(ranks):
        while board.state(row) == ABSENT:
            if time.monotonic() > deadline:
                raise DesyncError(f"rank {other} did not reach rank {rank}'s board in {limit_s} s")
            time.sleep(1e-3)
    if path is not None:
        os.unlink(path)  # all have it open; nothing is left behind, however they end
    if len(hosts) == 1:
        return Neighbours(board, ranks, None)
    store.get("failure")  # it is there from here on
    members = [[other for other in range(size) if keys[other] == key] for key in hosts]
    return Neighbours(board, ranks, HostLink(store, board, members, hosts.index(keys[rank])))


def _make_file(store: Any, leader: int, num_bytes: int) -> str:
    """Make the file of a board, readable by this user only, and post its name."""
    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    handle, path = tempfile.mkstemp(prefix="zerofx-board-", dir=folder)
    os.ftruncate(handle, num_bytes)
    os.close(handle)
    store.set(f"board/{leader}", path)
    return path
