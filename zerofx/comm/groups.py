"""Joining the other ranks: torchrun, the mesh, process groups, and the boards."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.comm import flight_recorder
from zerofx.comm.agreement import Agreement
from zerofx.comm.board import is_running, process_started
from zerofx.comm.collectives import Axis, Lane
from zerofx.comm.gloo import Algorithm, GlooAxis
from zerofx.comm.grid import SliceAxis, free_axes
from zerofx.comm.hosts import host_key, meet
from zerofx.comm.mail import Mail, MemoryWire, connect
from zerofx.comm.meeting import (
    BoundedStore,
    Meeting,
    from_environment,
    store_errors,
    timeout_s,
    within,
)
from zerofx.comm.nccl import NcclAxis
from zerofx.comm.watchdog import HostWatchdog, StreamWatchdog, last_resort_s
from zerofx.compat.groups import default_store, set_timeout, store_of_job
from zerofx.errors import DesyncError, PlanError, as_sentence
from zerofx.layout.buckets import ACROSS, AXES, CONTEXT, NODE

log = logging.getLogger("zerofx")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_HERE = "zerofx/here"  # key: of each rank's process
_TELL_S = 2.0  # how long a rank that has raised tries to reach the store to report it
_NAP_S = 0.05  # between two attempts to reach the server of the job's store


@dataclass(frozen=True)
class Axes:
    """A rank's axes and their process groups."""

    backend: str
    axes: dict[str, Axis]
    whole: Axis
    lane: Lane
    agreement: Agreement
    shard_mesh: DeviceMesh | None
    give_back: Callable[[], None]
    transfers: Callable[[list[int]], Any]


def place(device: torch.device | str | None, mesh: DeviceMesh | None = None) -> torch.device:
    """Return the given device, or one of the mesh's type: cuda:LOCAL_RANK or the host.

    Without either, return a CUDA device if there is one.

    Raises:
        PlanError: there is no such device, or its type is not that of the mesh.
    """
    kind = None if mesh is None else mesh.device_type
    if device is not None:
        found = _device(device)
        if kind not in (None, found.type):
            raise PlanError(
                f"device is {str(found)!r} but mesh is a mesh of {kind!r} devices. Leave device "
                f"out, or make the mesh with init_device_mesh({found.type!r}, ...)."
            )
        return found
    on_cuda = torch.cuda.is_available()
    if dist.is_initialized():
        on_cuda = on_cuda and "nccl" in str(dist.get_backend())
    kind = kind or ("cuda" if on_cuda else "cpu")
    if kind != "cuda":
        return _device(kind)
    local = os.environ.get("LOCAL_RANK")
    return _device("cuda" if local is None else f"cuda:{local}")


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlanError(
            f"device = {device!r} is not a device of torch. Use 'cpu', 'cuda' or 'cuda:0', or "
            "leave device out."
        ) from error
    if found.type == "cuda":
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= num:
            raise PlanError(
                f"device = {str(found)!r} does not exist. torch sees {num} CUDA devices on this "
                "machine. Use one of these, or device='cpu'."
            )
        if found.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return found


class StartUp:
    """The start of a world on this rank. If its body raises, the other ranks are told immediately.

    A model is compiled within one. Anything that ends it early on this rank (a refused plan, a lack
    of memory, Ctrl-C) also ends it on the ranks that wait for this one.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self._everyone: list[int] | None = None
        self._meeting: Meeting | None = None
        self._agreement: Agreement | None = None

    def __enter__(self) -> StartUp:
        _announce()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and os.environ.get("WORLD_SIZE") != "1":
            self._tell(error)

    def expect(self, everyone: list[int]) -> None:
        """Set the ranks that a start meets, if they are more than those of the mesh."""
        self._everyone = everyone

    def initialise(self, device: torch.device | str | None) -> None:
        """Create the default process group under torchrun if there is none, and report it.

        Raises:
            DesyncError: a rank did not arrive, or has raised; names it.
        """
        if not _is_under_torchrun():
            return
        limit_s, here = timeout_s(), place(device)
        backend = "nccl" if here.type == "cuda" else "gloo"
        if here.type == "cuda":
            torch.cuda.set_device(here)
        self._meeting = meeting = _job().start(limit_s)
        hosts = meeting.share("process", socket.gethostname())
        meeting.hosts.update(enumerate(hosts))
        try:
            with meeting.making("the process group"):
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore("default_pg", meeting.store.raw),
                    rank=meeting.rank,
                    world_size=meeting.size,
                    timeout=timedelta(seconds=limit_s),
                )
            meeting.share("process group", "")  # a rank that ends here is missed now, not later
        except BaseException:  # all ranks have the group, or none, so that all can start again
            if dist.is_initialized():
                dist.destroy_process_group()
            raise
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            sys.stderr.write(
                f"zerofx: made a process group: {backend}, {ranks} ranks, here {here}\n"
            )
        self._meeting = None

    def meet(self, everyone: list[int]) -> tuple[Meeting, Agreement, str]:
        """Meet the ranks of one world, `everyone`; return meeting, agreement and world name."""
        limit_s = timeout_s()
        self._meeting, name = _meeting_of_world(everyone, limit_s)
        met = meet(self._meeting)
        self._agreement = agreement = Agreement(
            met.board, met.ranks, limit_s, met.link, self._meeting.store, self._meeting.hosts
        )
        job = self._meeting.share("job", flight_recorder.new_job())[0]
        agreement.record = flight_recorder.recorder(job, name, self._meeting.rank, everyone)
        self._meeting.lost = lambda: agreement.lost(broken=True)
        return self._meeting, agreement, name

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one has raised."""
        with contextlib.suppress(Exception):  # whatever fails here, the user must see `error`
            reason = f"raised {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError, OSError):  # a missing store is noticed anyway
                if self._meeting is not None:
                    self._meeting.tell(f"{self._meeting.name([self._meeting.rank])} {reason}")
                elif self._agreement is None and not isinstance(error, DesyncError):
                    patience_s = 0.0 if isinstance(error, KeyboardInterrupt) else _TELL_S
                    self._tell_those_to_come(reason, patience_s)
            if self._agreement is not None:
                self._agreement.quit(f"it {reason}")

    def _tell_those_to_come(self, reason: str, patience_s: float) -> None:
        """Report it to the meeting that the other ranks will reach, if this one has not yet."""
        if not dist.is_initialized():
            if _is_under_torchrun():
                _job().tell(reason, patience_s)
            return
        everyone = list(range(dist.get_world_size()))
        if self._everyone is not None:
            everyone = self._everyone
        elif isinstance(self._mesh, DeviceMesh):  # the argument has not been checked yet
            everyone = self._mesh.mesh.flatten().tolist()
        if len(everyone) > 1 and dist.get_rank() in everyone:
            meeting, _ = _meeting_of_world(everyone, _TELL_S)
            meeting.tell(f"{meeting.name([meeting.rank])} {reason}")


def _is_under_torchrun() -> bool:
    """Return whether torchrun's variables are set and there is no process group yet."""
    return not dist.is_initialized() and all(name in os.environ for name in _TORCHRUN)


class _Job:
    """The ranks that torchrun's variables name, and the store through which they find each other.

    The store lives until the process ends. If rank 0 serves it, the other ranks can still read why
    a start failed, and all can start again. The n-th starts of all ranks belong together.
    """

    def __init__(self) -> None:
        self._size = from_environment("WORLD_SIZE", 1, 2**31 - 1)
        self._rank = from_environment("RANK", 0, self._size - 1)
        self._address = os.environ["MASTER_ADDR"], from_environment("MASTER_PORT", 1, 65535)
        self._uses_agent = _uses_agent()
        self._store: Any = None
        self._untold: list[str] = []  # reasons of failed starts that did not reach the store

    def start(self, limit_s: float) -> Meeting:
        """Return the meeting of this rank's next start.

        Raises:
            DesyncError: the store cannot be reached within the limit; says who serves it.
        """
        self._connect(limit_s, limit_s)
        self._catch_up()
        return self._next_meeting(limit_s)

    def tell(self, reason: str, patience_s: float) -> None:
        """Report that this rank's start failed before it met the others, which then raise too.

        If the store is not reached within `patience_s`, they learn of it at this rank's next start.
        """
        self._untold.append(reason)
        self._connect(_TELL_S, patience_s)
        self._catch_up()

    def _catch_up(self) -> None:
        while self._untold:
            meeting = self._next_meeting(_TELL_S)
            meeting.tell(f"{meeting.name([self._rank])} {self._untold.pop(0)}")

    def _next_meeting(self, limit_s: float) -> Meeting:
        with store_errors():
            number = BoundedStore(self._store, limit_s).add(self._counter, 1)
        store = dist.PrefixStore(f"zerofx/start/{number}", self._store)
        return Meeting(BoundedStore(store, limit_s), self._rank, self._size, limit_s)

    @property
    def _counter(self) -> str:
        return f"zerofx/starts/{self._rank}"

    def _connect(self, limit_s: float, patience_s: float) -> None:
        """Connect to the store once its server listens, unless it already answers.

        limit_s: the time limit of a request. patience_s: how long to wait for the server; Ctrl-C
        ends the wait.
        """
        try:
            if self._store is not None:
                self._store.set_timeout(timedelta(seconds=limit_s))
                BoundedStore(self._store, limit_s).add(self._counter, 0)
                return
        except DesyncError:  # it does not answer
            raise
        except RuntimeError:  # its server has ended; another one may have replaced it
            self._store = None
        serves = self._rank == 0 and not self._uses_agent
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if not serves:
                    socket.create_connection(self._address, timeout=_TELL_S).close()
                left_s = max(deadline - time.monotonic(), _TELL_S)
                store = within(left_s, store_of_job, left_s)
                store.set_timeout(timedelta(seconds=limit_s))
                self._store = store
                return
            except (RuntimeError, OSError) as error:
                if serves or time.monotonic() > deadline:
                    raise DesyncError(self._unreachable(serves, patience_s, error)) from error
            time.sleep(_NAP_S)

    def _unreachable(self, serves: bool, waited_s: float, error: Exception) -> str:
        where = "{}:{}".format(*self._address)
        if serves:
            return (
                f"rank 0 cannot serve the store of the job at {where}: {as_sentence(error)} End "
                "the process that holds the port, or set MASTER_PORT to another one on all ranks."
            )
        server = "torchrun" if self._uses_agent else "rank 0"
        return (
            f"{server}, which serves the store of the job at {where}, did not answer rank "
            f"{self._rank} within {waited_s:g} s (ZEROFX_TIMEOUT_S). Check MASTER_ADDR and "
            f"MASTER_PORT, and that rank 0 was started: {as_sentence(error)}"
        )


_JOBS: dict[tuple[object, ...], _Job] = {}


def _job() -> _Job:
    """Return the job that the environment names; the store of an earlier job is dropped."""
    key = os.getpid(), _uses_agent(), *(os.environ[name] for name in _TORCHRUN)
    if key not in _JOBS:
        _JOBS.clear()
        _JOBS[key] = _Job()
    return _JOBS[key]


def _uses_agent() -> bool:
    """Return whether torchrun, and not rank 0, serves the store of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meeting_of_world(everyone: list[int], limit_s: float) -> tuple[Meeting, str]:
    """Return a meeting of one world, in a store that only `everyone` uses, and the world's name."""
    name = f"zerofx/{'-'.join(map(str, everyone))}"
    store, rank = default_store(), everyone.index(dist.get_rank())
    with store_errors():  # the number is the same on every rank
        number = BoundedStore(store, limit_s).add(f"{name}/worlds/{rank}", 1)
    processes = BoundedStore(store, limit_s)
    store = BoundedStore(dist.PrefixStore(f"{name}/{number}", store), limit_s)
    meeting = Meeting(store, rank, len(everyone), limit_s)
    meeting.lost = lambda: _ended(processes, everyone)
    return meeting, str(number)


def _announce() -> None:
    """Post which process this rank is, so that ranks that wait for it notice its end."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        here = json.dumps([host_key(), os.getpid(), process_started(os.getpid())])
        with store_errors():
            store = BoundedStore(default_store(), timeout_s())
            store.set(f"{_HERE}/{dist.get_rank()}", here)


def _ended(processes: BoundedStore, ranks: list[int]) -> str | None:
    """Name a rank whose process has ended on this host; None if there is none, or none known."""
    host = host_key()
    for rank in ranks:
        key = f"{_HERE}/{rank}"
        processes.allow(processes.limit_s)
        with store_errors():
            known = processes.get(key) if processes.check([key]) else b""
        if known:
            place, pid, started = json.loads(known)
            if place == host and not is_running(pid, started):
                return f"rank {rank} ({place.partition('/')[0]}, process {pid}) died"
    return None


def other_axes(mesh: DeviceMesh | None, slices: SliceAxis | None = None) -> list[SliceAxis]:
    """Return the other axes of the mesh from which `mesh` was sliced, those of several ranks.

    Whether ranks along them hold the same parameters or others is not known here. The axis of the
    model's own `slices` is not among them: its ranks are part of the world.
    """
    found = [] if mesh is None else free_axes(mesh)
    return [axis for axis in found if slices is None or axis.dim != slices.dim]


def _check_same_grid(meeting: Meeting, ranks: list[list[int]]) -> None:
    """Check that every rank arranges the same ranks in the same replicas and shards."""
    grids = meeting.share("mesh", str(ranks))
    other = next((rank for rank, grid in enumerate(grids) if grid != grids[meeting.rank]), None)
    if other is not None:
        raise DesyncError(
            f"{meeting.name([meeting.rank])} calls zerofx.compile with mesh={ranks} while "
            f"{meeting.name([other])} calls it with mesh={grids[other]}. Pass the same mesh and "
            "shard_axis_size on every rank."
        )


def join(
    grid: Tensor, device: torch.device, algorithm: Algorithm, start: StartUp, context: int = 1,
    node: int = 1,
) -> Axes:  # fmt: skip
    """Create the process groups of the grid's axes and meet the other ranks, in a fixed order.

    context: how many neighbours along the data axes share each sequence. node: how many along the
        shard axis form a node.

    Raises:
        DesyncError: a rank did not arrive, or has raised; names it.
    """
    shown = grid.squeeze(0) if grid.shape[0] == 1 else grid
    ranks = (shown.squeeze(-1) if grid.shape[-1] == 1 else shown).tolist()  # as users write it
    me = dist.get_rank()
    at = [int(i) for i in (grid == me).nonzero()[0]]
    everyone = grid.flatten().tolist()
    backend = "nccl" if device.type == "cuda" else "gloo"
    joined: list[GlooAxis | NcclAxis] = []
    meeting, agreement, name = start.meet(everyone)
    _check_same_grid(meeting, ranks)  # groups of other ranks would never meet
    kept_as = backend, f"{ranks} {context} {node}"
    groups = _take(kept_as, meeting) or Groups(name)
    watchdog = (StreamWatchdog if backend == "nccl" else HostWatchdog)(agreement)
    lane = Lane(watchdog)

    groups.connect(meeting, backend)

    def axis(what: str, members: list[int]) -> Axis:
        if len(members) == 1:
            return Axis()
        position = members.index(me)
        if what not in groups.pairs:
            groups.pairs[what] = meeting.made(
                f"the groups of the {what} axis",
                lambda: (_new_group(members, device), _new_group(members, device)),
            )
        gathers, reduces = groups.pairs[what]
        elsewhere = frozenset(
            at for at, other in enumerate(members) if everyone.index(other) in meeting.elsewhere
        )
        made: GlooAxis | NcclAxis
        if backend == "nccl":
            made = NcclAxis(position, len(members), gathers, reduces, lane, elsewhere)
        else:
            wires = groups.wires(len(joined), [everyone.index(member) for member in members])
            made = GlooAxis(
                position, len(members), gathers, reduces, lane, algorithm, elsewhere, wires
            )
        joined.append(made)
        return made

    def line(dim: int) -> list[int]:
        return grid[tuple(slice(None) if d == dim else i for d, i in enumerate(at))].tolist()

    axes = {name: axis(name, line(dim)) for dim, name in reversed([*enumerate(AXES)])}
    several = [a for a in axes.values() if a.size > 1]
    whole = several[0] if len(several) == 1 else axis("whole", everyone)
    data = grid[at[0], :, :, at[-1]].reshape(-1, context).tolist()
    axes[CONTEXT] = axis(CONTEXT, next(members for members in data if me in members))
    first = at[2] // node * node
    axes[NODE] = axis(NODE, line(2)[first : first + node])
    axes[ACROSS] = axis(ACROSS, line(2)[at[2] % node :: node]) if node > 1 else Axis()
    if axes[NODE].elsewhere:
        log.warning(
            "The plan's nodes (secondary_shard_size or hierarchical_size) have %d of the ranks "
            "that share a bucket, and those of rank %d are on several hosts. Gathers within a node "
            "then go across hosts. Set it to the number of ranks per host, which must be "
            "neighbours.",
            node, me,
        )  # fmt: skip

    def break_off() -> None:
        groups.break_off()
        for each in joined:
            each.break_off()

    def give_back() -> None:
        _LIVING[kept_as] -= 1
        watchdog.stop()
        if not (lane.in_flight or agreement.has_failed):
            groups.launched += agreement.board.launched(agreement.board.rank)
            _keep(kept_as, groups)

    watchdog.start(break_off)
    _LIVING[kept_as] += 1
    if groups.mesh is None and axes["shard"].size > 1:
        groups.mesh = DeviceMesh.from_group(groups.pairs["shard"][0], device.type)
    transfers = partial(groups.for_transfers, everyone, meeting)
    return Axes(backend, axes, whole, lane, agreement, groups.mesh, give_back, transfers)


def _new_group(members: list[int], device: torch.device) -> Any:
    """Create a group in which only its members take part.

    gloo connects its members immediately, limited by the timeout of the group. Later transfers have
    a longer limit as the last resort (on NCCL it ends the process); the watchdog acts before it.
    """
    limit_s = timeout_s()
    last_s = last_resort_s(limit_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(
        members,
        backend=backend,
        timeout=timedelta(seconds=limit_s if backend == "gloo" else last_s),
        use_local_synchronization=True,
    )
    if backend == "gloo":
        set_timeout(group, device, last_s)
    return group


# -- groups of ended worlds, kept for the next world over the same ranks --------------------------
# A group costs three threads and some descriptors (with NCCL, device memory). It cannot be
# destroyed whenever a model happens to be collected: torch derives names of groups from those that
# exist, so ranks that destroy at different times would name the next group differently and hang;
# and NCCL needs all ranks to destroy one. So the groups of a dropped world are kept. A new world
# takes over groups that every rank has kept with an equal number of launches, all finished, so that
# nothing is in flight in them. Two living worlds never share groups, because only the agreement of
# one world orders its transfers. A compiled model is part of reference cycles, so that one that was
# dropped lives until Python collects it, which may be many models later: a next world collects
# first if others over its ranks still live.
@dataclass
class Groups:
    """The groups of one world: axis -> (gathers, reduces). `name` is equal on all its ranks.

    `launched` counts this rank's collectives in ended worlds. `transfers`: ranks -> a group.
    mail: connects the ranks of one host; None if the groups carry all messages.
    """

    name: str
    pairs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    transfers: dict[tuple[int, ...], Any] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    mail: Mail | None = None
    launched: int = 0
    job: Any = field(default_factory=lambda: dist.group.WORLD)

    def connect(self, meeting: Meeting, backend: str) -> None:
        """Connect the ranks for messages from memory to memory, unless they are; all call this."""
        if backend == "gloo" and self.mail is None:
            self.mail, why = connect(meeting)
            if why:
                log.info("zerofx: gloo carries all messages between ranks: %s.", why)

    def wires(self, number: int, ranks: list[int]) -> tuple[MemoryWire, MemoryWire] | None:
        """Return two wires, for gathers and reductions, among some ranks of the world.

        number: of the axis, in the order in which all ranks make their axes.
        """
        if self.mail is None:
            return None
        return self.mail.wire(2 * number, ranks), self.mail.wire(2 * number + 1, ranks)

    def break_off(self) -> None:
        """End every wait for a message from memory to memory; this is final."""
        if self.mail is not None:
            self.mail.break_off()

    def for_transfers(self, everyone: list[int], meeting: Meeting, members: list[int]) -> Any:
        """Return a gloo group of some ranks of the world, for files; only they call it.

        everyone: the ranks of the world in the job.
        """
        key = tuple(members)
        if key not in self.transfers:
            chosen, host = [everyone[rank] for rank in members], torch.device("cpu")
            self.transfers[key] = meeting.made(
                f"a group of ranks {members}", lambda: _new_group(chosen, host), members
            )
        return self.transfers[key]


_KEPT: dict[tuple[str, str], list[Groups]] = {}  # by backend and grid of ranks
_LIVING: Counter[tuple[str, str]] = Counter()  # worlds that have not given their groups back


def _keep(kind: tuple[str, str], groups: Groups) -> None:
    """Keep the groups of a world that has ended with nothing in flight."""
    _KEPT.setdefault(kind, []).append(groups)


def _take(kind: tuple[str, str], meeting: Meeting) -> Groups | None:
    """Return groups that all ranks have kept, the same on each; None if there are none.

    A collective call among the ranks of the meeting.

    Raises:
        DesyncError: a rank did not arrive; names it.
    """
    if _LIVING[kind] > 0:
        gc.collect()
    job = dist.group.WORLD
    for kept in _KEPT.values():  # torch destroys all groups together with the default one
        kept[:] = [groups for groups in kept if groups.job is job]
    mine = {groups.name: groups for groups in _KEPT.get(kind, [])}
    texts = meeting.share("spare", json.dumps({name: g.launched for name, g in mine.items()}))
    offers = [json.loads(text) for text in texts]
    common = [n for n in offers[0] if all(offer.get(n) == offers[0][n] for offer in offers)]
    if not common:
        return None
    chosen = mine[min(common, key=int)]
    _KEPT[kind].remove(chosen)
    return chosen
