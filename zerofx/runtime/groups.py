"""Joining the other ranks: torchrun, the mesh, one process group a purpose, the boards."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.compat.groups import default_store, root_mesh, set_timeout, store_of_job
from zerofx.errors import DesyncError, PlanError
from zerofx.runtime import spare
from zerofx.runtime.agreement import Agreement
from zerofx.runtime.collectives import Axis, Lane
from zerofx.runtime.gloo import Algorithm, GlooAxis
from zerofx.runtime.hosts import meet
from zerofx.runtime.meeting import Meeting, store_gone, timeout_s
from zerofx.runtime.nccl import NcclAxis
from zerofx.runtime.watchdog import StreamWatchdog, Watchdog, last_resort_s

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TELL_S = 2.0  # how long a rank that has raised tries to reach the store, to say so


@dataclass(frozen=True)
class Axes:
    """A rank's axes and what stands behind them."""

    backend: str
    shard: Axis
    replicate: Axis
    whole: Axis
    lane: Lane
    agreement: Agreement
    shard_mesh: DeviceMesh | None
    give_back: Callable[[], None]


def place(device: torch.device | str | None, mesh: DeviceMesh | None = None) -> torch.device:
    """Return the given device, or one of the mesh's type: CUDA's LOCAL_RANK-th, or the host.

    Without either it is a CUDA device where there is one.

    Raises:
        PlanError: there is no such device, or it is of another type than the mesh's.
    """
    kind = None if mesh is None else mesh.device_type
    if device is not None:
        found = _device(device)
        if kind not in (None, found.type):
            raise PlanError(
                f"device is {str(found)!r} but mesh is a mesh of {kind!r} devices. Leave device "
                f"out, or make the mesh with init_device_mesh({found.type!r}, ...)"
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
            "leave device out"
        ) from error
    if found.type == "cuda":
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= num:
            raise PlanError(
                f"device = {str(found)!r} is not there. torch sees {num} CUDA devices on this "
                "machine. Use one of these, or device='cpu'"
            )
        if found.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return found


class StartUp:
    """One start of a world on this rank. Where its body raises, the other ranks are told at once.

    A model is compiled in one: whatever ends that early on this rank (a plan that is refused, a
    lack of memory, Ctrl-C) ends it on the ranks that wait for this one.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self._meeting: Meeting | None = None
        self._agreement: Agreement | None = None

    def __enter__(self) -> StartUp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and os.environ.get("WORLD_SIZE") != "1":
            self._tell(error)

    def initialise(self, device: torch.device | str | None) -> None:
        """Make the default process group under torchrun if there is none yet, and say so.

        Raises:
            DesyncError: a rank did not come, or has raised; names it.
        """
        if not _is_under_torchrun():
            return
        limit_s, here = timeout_s(), place(device)
        backend = "nccl" if here.type == "cuda" else "gloo"
        if here.type == "cuda":
            torch.cuda.set_device(here)
        self._meeting = meeting = _meeting_of_job(limit_s, limit_s)
        hosts = meeting.share("process", socket.gethostname())
        meeting.hosts.update(enumerate(hosts))
        with meeting.making("the process group"):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("default_pg", meeting.store),
                rank=meeting.rank,
                world_size=meeting.size,
                timeout=timedelta(seconds=limit_s),
            )
        meeting.share("process group", "")  # a rank that ends now is missed before, not behind it
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            sys.stderr.write(
                f"zerofx: made a process group: {backend}, {ranks} ranks, here {here}\n"
            )
        self._meeting = None

    def meet(self, everyone: list[int]) -> tuple[Meeting, Agreement, str]:
        """Meet the ranks of one world, `everyone`; return how they agree, and the world's name."""
        limit_s = timeout_s()
        self._meeting, name = _meeting_of_world(everyone, limit_s)
        met = meet(self._meeting)
        self._agreement = agreement = Agreement(
            met.board, met.ranks, limit_s, met.link, self._meeting.store
        )
        self._meeting.lost = lambda: agreement.lost(broken=True)
        return self._meeting, agreement, name

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks know that this one has raised."""
        reason = f"raised {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError, OSError):  # a store that is gone tells it too
            if self._meeting is None and self._agreement is None:
                self._meeting = self._meeting_to_tell()
            if self._meeting is not None:
                self._meeting.tell(f"{self._meeting.name([self._meeting.rank])} {reason}")
        if self._agreement is not None:
            self._agreement.quit(f"it {reason}")

    def _meeting_to_tell(self) -> Meeting | None:
        """Return the meeting that the other ranks will come to, where this one has not yet."""
        if dist.is_initialized():
            size = dist.get_world_size()
            everyone = list(range(size))
            if isinstance(self._mesh, DeviceMesh):  # what was passed has not been checked yet
                everyone = self._mesh.mesh.flatten().tolist()
            if len(everyone) == 1 or dist.get_rank() not in everyone:
                return None
            return _meeting_of_world(everyone, _TELL_S)[0]
        if not _is_under_torchrun() or not _answers():
            return None
        return _meeting_of_job(_TELL_S, _TELL_S)


def _is_under_torchrun() -> bool:
    """Tell whether torchrun's variables are set, and no process group has been made yet."""
    return not dist.is_initialized() and all(name in os.environ for name in _TORCHRUN)


def _answers() -> bool:
    """Tell whether the store of the job answers already."""
    with contextlib.suppress(OSError):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=_TELL_S).close()
        return True
    return False


def _meeting_of_job(limit_s: float, connect_s: float) -> Meeting:
    """Return the meeting of all ranks of the job, through the store that torchrun's variables name.

    Raises:
        DesyncError: the store cannot be reached; says who serves it.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = store_of_job(connect_s)
        number = store.add(f"zerofx/starts/{rank}", 1)  # the same on every rank
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        uses_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        server = "torchrun, which" if uses_agent else "rank 0, which"
        raise DesyncError(
            f"{server} serves the store of the job at {where}, did not answer rank {rank} within "
            f"{connect_s:g} s (ZEROFX_TIMEOUT_S). Check MASTER_ADDR and MASTER_PORT, and that "
            f"rank 0 was started: {error}"
        ) from error
    store = dist.PrefixStore(f"zerofx/start/{number}", store)
    return Meeting(store, rank, size, limit_s)


def _meeting_of_world(everyone: list[int], limit_s: float) -> tuple[Meeting, str]:
    """Return a meeting through a store that only `everyone` uses, for one world, and its name."""
    name = f"zerofx/{'-'.join(map(str, everyone))}"
    store, rank = default_store(), everyone.index(dist.get_rank())
    try:
        number = store.add(f"{name}/worlds/{rank}", 1)  # the same on every rank
    except RuntimeError as error:
        raise DesyncError(f"{store_gone()}: {error}") from error
    store = dist.PrefixStore(f"{name}/{number}", store)
    return Meeting(store, rank, len(everyone), limit_s), str(number)


def other_axes(mesh: DeviceMesh | None) -> str:
    """Name the axes of the whole mesh that a model's own was sliced from, with their sizes.

    Ranks along them hold other parameters, or the same ones; which is not known here.
    """
    if mesh is None:
        return ""
    root, mine = root_mesh(mesh), mesh.mesh_dim_names or ()
    if root.size() == mesh.size():
        return ""
    sizes = zip(root.mesh_dim_names or (), root.shape, strict=False)
    return ", ".join(f"{n} ({size})" for n, size in sizes if n not in mine and size > 1)


def _check_same_grid(meeting: Meeting, ranks: list[list[int]]) -> None:
    """Raise unless every rank arranges the same ranks in the same replicas and shards."""
    grids = meeting.share("mesh", str(ranks))
    other = next((rank for rank, grid in enumerate(grids) if grid != grids[meeting.rank]), None)
    if other is not None:
        raise DesyncError(
            f"{meeting.name([meeting.rank])} calls zerofx.compile with mesh={ranks} while "
            f"{meeting.name([other])} calls it with mesh={grids[other]}. Pass the same mesh and "
            "shard_axis_size on every rank."
        )


def join(grid: Tensor, device: torch.device, algorithm: Algorithm, start: StartUp) -> Axes:
    """Make the process groups of the grid's axes and meet the other ranks, all in one order.

    Raises:
        DesyncError: a rank did not come, or has raised; names it.
    """
    ranks = grid.tolist()
    row, column = (int(i) for i in (grid == dist.get_rank()).nonzero()[0])
    everyone = [rank for line in ranks for rank in line]
    backend = "nccl" if device.type == "cuda" else "gloo"
    joined: list[GlooAxis | NcclAxis] = []
    rank = row * len(ranks[0]) + column
    meeting, agreement, name = start.meet(everyone)
    _check_same_grid(meeting, ranks)  # groups of other ranks would never meet
    groups = spare.take((backend, str(ranks)), meeting) or spare.Groups(name)
    watchdog = (StreamWatchdog if backend == "nccl" else Watchdog)(agreement)
    lane = Lane(watchdog)

    def axis(what: str, members: list[int], position: int) -> Axis:
        if len(members) == 1:
            return Axis()
        if what not in groups.pairs:
            with meeting.making(f"the groups of the {what} axis"):
                groups.pairs[what] = _new_group(members, device), _new_group(members, device)
        gathers, reduces = groups.pairs[what]
        made: GlooAxis | NcclAxis
        if backend == "nccl":
            made = NcclAxis(position, len(members), gathers, reduces, lane)
        else:
            made = GlooAxis(position, len(members), gathers, reduces, lane, algorithm)
        joined.append(made)
        return made

    shard = axis("shard", ranks[row], column)
    replicate = axis("replicate", [line[column] for line in ranks], row)
    if shard.size == 1 or replicate.size == 1:
        whole = replicate if shard.size == 1 else shard
    else:
        whole = axis("whole", everyone, rank)

    def break_off() -> None:
        for each in joined:
            each.break_off()

    def give_back() -> None:
        watchdog.stop()
        if not (lane.in_flight or agreement.has_failed):
            groups.launched += agreement.board.launched(agreement.board.rank)
            spare.keep((backend, str(ranks)), groups)

    watchdog.start(break_off)
    if groups.mesh is None and shard.size > 1:
        groups.mesh = DeviceMesh.from_group(groups.pairs["shard"][0], device.type)
    return Axes(backend, shard, replicate, whole, lane, agreement, groups.mesh, give_back)


def _new_group(members: list[int], device: torch.device) -> Any:
    """Make a group in which only its members take part.

    gloo connects its members at once, for which its timeout is the limit. Later, transfers have
    a limit of their own as the last resort (NCCL's ends the process); the watchdog comes first.
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
