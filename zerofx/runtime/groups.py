"""Joining the other ranks: torchrun, the mesh, one process group a purpose, the boards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.compat.groups import default_store
from zerofx.errors import PlanError
from zerofx.runtime import spare
from zerofx.runtime.agreement import Agreement
from zerofx.runtime.collectives import Axis, Lane
from zerofx.runtime.gloo import Algorithm, GlooAxis
from zerofx.runtime.hosts import meet
from zerofx.runtime.nccl import NcclAxis
from zerofx.runtime.watchdog import StreamWatchdog, Watchdog, timeout_s

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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


def place(device: torch.device | str | None) -> torch.device:
    """Return the given device, or CUDA's LOCAL_RANK-th where there is one, or the host."""
    if device is not None:
        return torch.device(device)
    on_cuda = torch.cuda.is_available()
    if dist.is_initialized():
        on_cuda = on_cuda and "nccl" in str(dist.get_backend())
    if not on_cuda:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def initialise_under_torchrun(device: torch.device | str | None) -> None:
    """Make the default process group if torchrun started this process and nobody has; say so."""
    if dist.is_initialized() or not all(name in os.environ for name in _TORCHRUN):
        return
    here = place(device)
    backend = "nccl" if here.type == "cuda" else "gloo"
    if here.type == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(backend)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        sys.stderr.write(f"zerofx: made a process group: {backend}, {ranks} ranks, here {here}\n")


def rank_grid(mesh: DeviceMesh | None, shard_size: int | None) -> Tensor:
    """Return the global ranks as a [replicate, shard] grid.

    Raises:
        PlanError: the mesh has more than two axes, or `shard_size` does not fit it or the ranks.
    """
    if mesh is not None:
        if mesh.ndim > 2:
            raise PlanError(
                f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; pass the 1-D (shard) or 2-D "
                "(replicate, shard) submesh that data parallelism runs over"
            )
        grid = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
        if shard_size not in (None, grid.shape[1]):
            raise PlanError(
                f"shard_axis_size is {shard_size} but the mesh's shard axis has {grid.shape[1]} "
                "ranks; leave one of the two out"
            )
        return grid
    size = dist.get_world_size()
    per_group = shard_size or size
    if size % per_group:
        raise PlanError(
            f"shard_axis_size is {per_group}, which does not divide the {size} ranks; "
            f"choose one of {[n for n in range(1, size + 1) if size % n == 0]}"
        )
    return torch.arange(size).reshape(-1, per_group)


def join(grid: Tensor, device: torch.device, algorithm: Algorithm) -> Axes:
    """Make the process groups of the grid's axes and meet the other ranks, all in one order."""
    ranks = grid.tolist()
    found = (grid == dist.get_rank()).nonzero()
    if len(found) != 1:
        raise PlanError(f"this process, rank {dist.get_rank()}, is not on the mesh {ranks}")
    row, column = (int(i) for i in found[0])
    everyone = [rank for line in ranks for rank in line]
    backend = "nccl" if device.type == "cuda" else "gloo"
    joined: list[GlooAxis | NcclAxis] = []
    rank = row * len(ranks[0]) + column
    store, name = _meeting_place(everyone, rank)
    agreement = _meet(store, rank, len(everyone))
    groups = spare.take((backend, str(ranks)), store, rank, len(everyone)) or spare.Groups(name)
    watchdog = (StreamWatchdog if backend == "nccl" else Watchdog)(agreement)
    lane = Lane(watchdog)

    def axis(what: str, members: list[int], position: int) -> Axis:
        if len(members) == 1:
            return Axis()
        if what not in groups.pairs:
            groups.pairs[what] = _new_group(members, backend), _new_group(members, backend)
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


def _meeting_place(everyone: list[int], rank: int) -> tuple[dist.Store, str]:
    """Return a store that only `everyone` uses, for this one world, and its name."""
    name = f"zerofx/{'-'.join(map(str, everyone))}"
    store = default_store()
    how_manieth = store.add(f"{name}/worlds/{rank}", 1)  # the same on every rank
    return dist.PrefixStore(f"{name}/{how_manieth}", store), str(how_manieth)


def _meet(store: dist.Store, rank: int, size: int) -> Agreement:
    limit_s = timeout_s()
    met = meet(store, rank, size, limit_s)
    return Agreement(met.board, met.ranks, limit_s, met.link)


def _new_group(members: list[int], backend: str) -> Any:
    """Make a group in which only its members take part.

    Its own timeout is the last resort (NCCL's ends the process); the watchdog comes first.
    """
    return dist.new_group(
        members,
        backend=backend,
        timeout=timedelta(seconds=2 * timeout_s() + 60),
        use_local_synchronization=True,
    )
