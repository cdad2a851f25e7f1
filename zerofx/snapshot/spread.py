"""Snapshots spread over the disks of several hosts: no file system that all ranks share.

    host a    run/step-000100/   zerofx.json  .metadata  values.pt  __0_0.distcp  __1_0.distcp
    host b    run/step-000100/   zerofx.json  .metadata  values.pt  __1_0.distcp  __0_0.distcp

Every host has the manifest, the index and the other values of a snapshot. Of the files with
tensors, it has those of its own ranks, and copies of those of the hosts before it (`copies` of
them, the last host being before the first). A host that is lost takes nothing with it that is not
on another one.

To save (saving.py): all ranks write to their host's disk, the hosts send each other copies, then
each publishes its directory, and only when all have done so are older snapshots removed.

To load (loading.py): the hosts tell each other what they have. The newest snapshot is taken of
which every file is on some host. Each host then gets the files that its ranks need and it lacks,
or has damaged. So a host that replaces a lost one, ranks that have changed their host, and another
number of ranks are all the same case.

A host here is a directory and the ranks that see it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.comm import hosts
from zerofx.comm.together import together
from zerofx.comm.world import World
from zerofx.errors import DesyncError, SnapshotError, as_sentence
from zerofx.snapshot import files, series, target
from zerofx.snapshot.held import Replaced

log = logging.getLogger("zerofx")

_PIECE_BYTES = 1 << 24
_LOOK_S = 0.1  # how often to look whether the other ranks are alive
_FAREWELL_S = 2.0  # within which a lost connection is explained by the end of a process
SMALL = (target.MANIFEST, target.INDEX, target.VALUES)  # files that every host has


class Hosts:
    """The hosts of a world: which ranks see the same directory.

    ranks: those of each host. The first of them is its leader, which sends and receives files.
    """

    def __init__(self, world: World, keys: Sequence[str]) -> None:
        self._world = world
        order = list(dict.fromkeys(keys))
        self._host = [order.index(key) for key in keys]
        self.ranks = [[r for r, k in enumerate(keys) if k == key] for key in order]
        self.leaders = [ranks[0] for ranks in self.ranks]
        self.here = self._host[world.rank]

    @classmethod
    def of(cls, world: World, what: str, folder: Path) -> Hosts:
        """Find out which ranks see the same directory of this name; a collective call."""
        return cls(world, together(world, what, partial(_where, folder), SnapshotError))

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its host."""
        return self._world.rank in self.leaders

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among the ranks of its host, and how many these are."""
        ranks = self.ranks[self.here]
        return ranks.index(self._world.rank), len(ranks)

    def leader(self, rank: int) -> int:
        """Return the leader of a rank's host."""
        return self.leaders[self._host[rank]]

    def copied_to(self, host: int, copies: int) -> list[int]:
        """Return the hosts that get copies of the files of one."""
        return [(host + 1 + n) % len(self.ranks) for n in range(copies)]

    def check_copies(self, copies: int) -> None:
        """Check that there are enough hosts.

        Raises:
            SnapshotError: there are too few; names both numbers.
        """
        if copies >= len(self.ranks):
            count = f"{len(self.ranks)} hosts" if len(self.ranks) > 1 else "one host"
            raise SnapshotError(
                f"copies={copies}, but the ranks run on {count}, and a copy has to be on another "
                f"host. Give copies={len(self.ranks) - 1}, or leave copies out if all hosts share "
                "the file system."
            )

    def connect(self) -> None:
        """Connect the leaders. Later calls of `carry` may then be in a thread.

        Groups are made in the main thread only: torch counts them, and all ranks must agree.
        """
        if self.is_leader and len(self.leaders) > 1:
            self._world.for_transfers(self.leaders)

    def carry(
        self,
        deliveries: Sequence[Delivery],
        sent: Path,
        received: Path,
        is_checked: bool = False,
    ) -> None:
        """Send and receive files; only leaders call it, all with the same list.

        is_checked: the receivers verify them, so that this rank need not raise if it cannot read
            one.
        """
        if deliveries and len(self.leaders) > 1:
            group, lost = self._world.for_transfers(self.leaders)
            courier = Courier(group, self.leaders, self._world.rank, lost)
            courier.carry(deliveries, sent, received, is_checked)


def _where(folder: Path) -> str:
    """Return a text that is equal for ranks which see the same directory of this name.

    Its parent is looked at, or what there is above that. The directory itself is replaced by each
    save, so that ranks beside one would see others of that name, or none.
    """
    above = folder.parent
    while True:
        try:
            found = above.stat()
            break
        except (FileNotFoundError, NotADirectoryError):
            above = above.parent
    rest = folder.relative_to(above)
    return f"{hosts.host_key()} {found.st_dev} {found.st_ino} {rest}"


# -- saving ---------------------------------------------------------------------------------------
def copies_of(
    hosts: Hosts, copies: int, sums: Sequence[Mapping[str, Sequence[int]]]
) -> list[Delivery]:
    """Return the copies to send of the files that the ranks have written.

    sums: for each rank, its files with [size in bytes, checksum].
    """
    return [
        Delivery(name, held[name][0], hosts.leader(rank), hosts.leaders[host])
        for rank, held in enumerate(sums)
        for host in hosts.copied_to(hosts.leaders.index(hosts.leader(rank)), copies)
        for name in sorted(held)
    ]


def to_all(hosts: Hosts, sums: Mapping[str, Sequence[int]]) -> list[Delivery]:
    """Return the transfers of files that rank 0 has written to all other hosts."""
    return [
        Delivery(name, num_bytes, hosts.leader(0), leader)
        for leader in hosts.leaders
        if leader != hosts.leader(0)
        for name, (num_bytes, _) in sums.items()
    ]


# -- loading --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sight:
    """What one host has of a spread snapshot.

    name: of its directory in the series; "" for the directory that was given. saved: when, in
    seconds since 1970. sums: [size in bytes, sha256] of all files of the snapshot. held: the names
    of those that are here.
    """

    name: str
    identity: str
    saved: float
    sums: Mapping[str, Sequence[Any]]
    held: frozenset[str]


@dataclass(frozen=True)
class Candidate:
    """A snapshot that may be loaded. sights: what each host has of it; None for a plain one."""

    name: str
    sights: tuple[Sight | None, ...] | None = None

    def within(self, folder: Path) -> Path:
        """Return the path of the snapshot."""
        return folder / self.name if self.name else folder

    def missing(self) -> list[str]:
        """Return the files that no host has."""
        seen = [sight for sight in self.sights or () if sight is not None]
        return sorted(set(seen[0].sums) - set().union(*(sight.held for sight in seen)))


def look(folder: Path) -> list[Sight]:
    """Return what this host has of spread snapshots; a warning names damaged manifests."""
    is_one = (folder / target.MANIFEST).exists()
    found = []
    for each in [folder] if is_one else series.snapshots_in(folder):
        with files.damaged_left_out(each):
            snapshot = files.OpenSnapshot(target.place(each))
            with contextlib.closing(snapshot), snapshot.watched():
                if not snapshot.is_spread:
                    continue
                facts = snapshot.manifest
                manifest = {target.MANIFEST: files.checksum(snapshot.folder / target.MANIFEST)}
                saved = facts.get("saved")
                found.append(
                    Sight(
                        "" if is_one else each.name, snapshot.identity,
                        saved if isinstance(saved, float) else 0.0,
                        {**facts["files"], **manifest}, snapshot.held(),
                    )
                )  # fmt: skip
    return found


def candidates(world: World, hosts: Hosts, folder: Path) -> list[Candidate]:
    """Return the snapshots at a path, newest first, plain and spread ones; a collective call.

    Plain ones are those that rank 0 sees in a series.
    """
    what = f"looking for snapshots in {folder.name}"

    def here() -> tuple[list[tuple[str, float]], list[Sight]]:
        seen = look(folder) if hosts.is_leader else []
        mine = {sight.name for sight in seen}
        plain = series.snapshots_in(folder) if world.rank == 0 else []
        dated = [(each.name, series.saved_at(each)[0]) for each in plain if each.name not in mine]
        return dated, seen

    views = together(world, what, here, SnapshotError)
    plain, sights = views[0][0], [views[leader][1] for leader in hosts.leaders]
    spread = {sight.identity: sight for seen in sights for sight in seen}
    if not spread:
        return [Candidate(name) for name, _ in plain]
    dated = [(sight.saved, _of_all(sight, sights)) for sight in spread.values()]
    if plain and len(hosts.ranks) > 1:  # one that a host has saved alone is no snapshot of all

        def identities() -> list[str]:
            return [_identity(folder / name) for name, _ in plain] if hosts.is_leader else []

        found = together(world, what, identities, SnapshotError)
        alike = list(zip(*(found[leader] for leader in hosts.leaders), strict=True))
        plain = [each for each, seen in zip(plain, alike, strict=True) if len(set(seen)) == 1]
    dated += [(saved, Candidate(name)) for name, saved in plain]
    return [each for _, each in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def _identity(folder: Path) -> str:
    """Return which snapshot this is; "" if it cannot be opened."""
    try:
        with contextlib.closing(files.OpenSnapshot(folder)) as snapshot:
            return snapshot.identity
    except (SnapshotError, OSError, Replaced):
        return ""


def _of_all(sight: Sight, sights: Sequence[Sequence[Sight]]) -> Candidate:
    """Return a spread snapshot with what each host has of it."""
    by_host = ({each.identity: each for each in seen} for seen in sights)
    return Candidate(sight.name, tuple(seen.get(sight.identity) for seen in by_host))


class Lost(SnapshotError):
    """A file of a snapshot is on no host, or damaged wherever it is."""


class Gathering:
    """Bringing the files of a spread snapshot to the hosts whose ranks need them.

    Every file is verified when it has arrived; from a host whose file is damaged, it is not taken
    again. On a host that has nothing of the snapshot, the files come into a hidden directory, which
    is published once the snapshot has been loaded. What else has the snapshot's name there stays.

    folder: the snapshot on this host; it may not exist. path: the directory to load from.
    """

    def __init__(self, world: World, hosts: Hosts, candidate: Candidate, folder: Path) -> None:
        assert candidate.sights is not None
        self._world, self._hosts, self._folder = world, hosts, folder
        seen = [sight for sight in candidate.sights if sight is not None]
        self._sums = seen[0].sums
        self._held = [set(sight.held) if sight else set() for sight in candidate.sights]
        self._is_new = candidate.sights[hosts.here] is None
        self._place: target.SavePlace | None = None  # on leaders that have received files
        self._what = f"gathering the files of {folder.name}"
        self.path = folder

    def __enter__(self) -> Gathering:
        """Make the hidden directories of hosts that have nothing; a collective call."""

        def begin() -> Path:
            return self._staging().path if self._is_new and self._hosts.is_leader else self._folder

        try:
            paths = together(self._world, self._what, begin, SnapshotError)
        except BaseException:
            self.__exit__()
            raise
        self.path = paths[self._hosts.leader(self._world.rank)]
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None

    def _staging(self) -> target.SavePlace:
        """Return the directory that receives files."""
        if self._place is None:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            place = target.SavePlace(self._folder.parent, self._folder.name, self._folder)
            self._place = place
            place.make()
        return self._place

    def get(self, needed: Sequence[set[str]]) -> None:
        """Send each host the files it needs and lacks; a collective call.

        needed: for each host, the names.

        Raises:
            Lost: a file that is needed is on no host; names it.
        """
        leaders = self._hosts.leaders
        while True:
            deliveries: list[Delivery] = []
            for host, names in enumerate(needed):
                for name in sorted(names - self._held[host]):
                    holders = [h for h, held in enumerate(self._held) if name in held]
                    if not holders:
                        raise Lost(f"{self._folder / name}: on no host, or damaged on all.")
                    source = holders[len(deliveries) % len(holders)]  # all share the work
                    num_bytes = self._sums[name][0]
                    deliveries.append(Delivery(name, num_bytes, leaders[source], leaders[host]))
            if not deliveries:
                return
            damaged = self._transfer(deliveries)
            for each in deliveries:
                if each in damaged:
                    self._held[leaders.index(each.source)].discard(each.name)
                else:
                    self._held[leaders.index(each.target)].add(each.name)

    def _transfer(self, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Send and receive; return those deliveries that have arrived damaged, on any host."""
        mine = [each for each in deliveries if each.target == self._world.rank]

        def prepare() -> None:
            if mine:
                target.check_space(self._staging().path, sum(each.num_bytes for each in mine))

        def carry() -> None:
            if self._hosts.is_leader:
                received = self._staging().path if mine else self.path
                with self._world.busy(self._what):
                    self._hosts.carry(deliveries, self.path, received, is_checked=True)

        def install() -> set[Delivery]:
            if not mine:
                return set()
            received = self._staging().path
            bad = {
                each
                for each in mine
                if files.checksum(received / each.name) != list(self._sums[each.name])
            }
            for each in bad:
                log.warning(
                    "zerofx: %s of rank %d's host is damaged or cannot be read.",
                    self._folder / each.name, each.source,
                )  # fmt: skip
                (received / each.name).unlink()
            if not self._is_new:
                target.add(received, self._folder)
            return bad

        together(self._world, self._what, prepare, SnapshotError)
        together(self._world, self._what, carry, SnapshotError)
        return set().union(*together(self._world, self._what, install, SnapshotError))

    def drop(self, damaged: Sequence[set[str]]) -> None:
        """Take note of files that are damaged on each host, so that others are asked for them."""
        for host, names in enumerate(damaged):
            if names:
                log.warning(
                    "zerofx: on host %d of %d, %s of %s are damaged; copies are taken.",
                    host, len(damaged), ", ".join(sorted(names)), self._folder,
                )  # fmt: skip
            self._held[host] -= names

    def finish(self) -> None:
        """Publish what hosts that had nothing have received; a collective call."""

        def publish() -> None:
            if self._is_new and self._place is not None and not os.path.lexists(self._folder):
                target.publish(self._place.path, self._folder)

        together(self._world, self._what, publish, SnapshotError)


# -- files from host to host ----------------------------------------------------------------------
# Each leader sends its files in one thread and receives in another, both in the order of one list
# that all have. So no two wait for each other: the first delivery that has not ended is next on
# both of its sides.
@dataclass(frozen=True)
class Delivery:
    """A file that one rank sends to another. source, target: ranks of the world."""

    name: str
    num_bytes: int
    source: int
    target: int


class Courier:
    """Sends and receives files for one rank.

    group: a gloo group whose members are `ranks` of the world, in this order.
    lost: returns why a rank will not take part any more; None if all may.
    """

    def __init__(
        self, group: Any, ranks: Sequence[int], rank: int, lost: Callable[[], str | None]
    ) -> None:
        self._group, self._ranks, self._rank, self._lost = group, ranks, rank, lost

    def carry(
        self,
        deliveries: Sequence[Delivery],
        sent: Path,
        received: Path,
        is_checked: bool = False,
    ) -> None:
        """Send this rank's files from directory `sent`, and write those it gets to `received`.

        All ranks of the group call it with the same list. If a file cannot be read or written, the
        transfers go on, so that no other rank waits, and the error is raised at the end.

        is_checked: zeros in place of what cannot be read are no error.

        Raises:
            OSError: a file could not be read or written.
            DesyncError: a rank died; names it.
        """
        out = [delivery for delivery in deliveries if delivery.source == self._rank]
        into = [delivery for delivery in deliveries if delivery.target == self._rank]
        jobs = [_started(self._send, out, sent), _started(self._receive, into, received)]
        while not all(job.done() for job in jobs):
            if (lost := self._lost()) is not None:
                raise DesyncError(as_sentence(lost))
            time.sleep(_LOOK_S)
        for job in jobs:
            error = job.exception()
            if is_checked and job is jobs[0] and isinstance(error, OSError):
                continue
            if isinstance(error, RuntimeError):
                raise self._explained(error) from error
            if error is not None:
                raise error

    def _explained(self, error: RuntimeError) -> DesyncError:
        """Return the error of a broken connection, which is noticed before a process has ended."""
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline:
            if (lost := self._lost()) is not None:
                return DesyncError(as_sentence(lost))
            time.sleep(_LOOK_S)
        return DesyncError(f"the connection to another host broke: {as_sentence(error)}")

    def _send(self, deliveries: Sequence[Delivery], folder: Path) -> None:
        with _Disk() as disk:
            for delivery in deliveries:
                file = disk.opened(folder / delivery.name, "rb")
                for piece in _pieces(delivery.num_bytes):
                    disk.read(file, piece.zero_())
                    dist.send(
                        piece, group=self._group, group_dst=self._ranks.index(delivery.target)
                    )

    def _receive(self, deliveries: Sequence[Delivery], folder: Path) -> None:
        with _Disk() as disk:
            for delivery in deliveries:
                file = disk.opened(folder / delivery.name, "wb")
                for piece in _pieces(delivery.num_bytes):
                    source = self._ranks.index(delivery.source)
                    dist.recv(piece, group=self._group, group_src=source)
                    disk.write(file, piece)
                disk.sync(file)


def _pieces(num_bytes: int) -> Iterator[Tensor]:
    """Yield tensors of uint8 that together have this many elements."""
    whole = torch.empty(min(num_bytes, _PIECE_BYTES), dtype=torch.uint8)
    for start in range(0, num_bytes, _PIECE_BYTES):
        yield whole[: min(_PIECE_BYTES, num_bytes - start)]


def _bytes(piece: Tensor) -> memoryview:
    view: Any = piece.numpy()
    return memoryview(view)


class _Disk:
    """Files that are read and written one after the other, each until it fails.

    The first error is raised at the end.
    """

    def __init__(self) -> None:
        self._problem: OSError | None = None
        self._has_failed = False  # the file that is open now
        self._open = ExitStack()

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.close()
        if self._problem is not None and raised[0] is None:
            raise self._problem

    def opened(self, path: Path, mode: str) -> BinaryIO | None:
        """Close the file before and open this one; return None if that fails."""
        self._has_failed = False
        found: Any = self._tried(path, lambda: path.open(mode))
        self._open.close()
        return None if found is None else self._open.enter_context(found)

    def read(self, file: BinaryIO | None, piece: Tensor) -> None:
        """Fill a piece from a file."""

        def fill(file: BinaryIO) -> None:
            if file.readinto(_bytes(piece)) != piece.numel():  # type: ignore[attr-defined]
                raise OSError(f"{file.name} is shorter than when it was saved.")

        if file is not None:
            self._tried(Path(file.name), lambda: fill(file))

    def write(self, file: BinaryIO | None, piece: Tensor) -> None:
        """Append a piece to a file."""
        if file is not None:
            self._tried(Path(file.name), lambda: file.write(_bytes(piece)))

    def sync(self, file: BinaryIO | None) -> None:
        """Bring a file to the disk."""
        if file is not None:
            self._tried(Path(file.name), file.flush)
            self._tried(Path(file.name), lambda: os.fsync(file.fileno()))

    def _tried(self, path: Path, step: Callable[[], Any]) -> Any:
        if self._has_failed:
            return None
        try:
            return step()
        except OSError as error:
            error.filename = error.filename or str(path)
            self._problem, self._has_failed = self._problem or error, True
            return None


def _started(run: Callable[..., None], *args: Any) -> Future[None]:
    """Run in a thread that does not keep the process from ending; return its future."""
    future: Future[None] = Future()

    def body() -> None:
        try:
            run(*args)
        except BaseException as error:  # noqa: BLE001  (raised by the reader of the future)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=body, name="zerofx-transfer", daemon=True).start()
    return future
