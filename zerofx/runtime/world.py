"""Who this rank is, and its collectives: one World per compiled model.

Ranks form a grid of (replicate, shard): rank = replicate_rank * shard_size + shard_rank. Values are
sharded over the shard axis; the replicate axis holds copies of the same shards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import PlanError
from zerofx.runtime.collectives import (
    KINDS,
    Algorithm,
    Axis,
    GlooAxis,
    Lane,
    NcclAxis,
    Traffic,
    Work,
    always_direct,
)
from zerofx.runtime.watchdog import Watchdog, timeout_s

log = logging.getLogger("zerofx")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Then(Work):
    """A second collective that starts when the first has finished."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Work, second: Callable[[], Work]) -> None:
        self._first = first
        self._second: Callable[[], Work] | None = second

    def wait(self) -> None:
        if self._second is None:
            return
        self._first.wait()
        second, self._second = self._second, None
        second().wait()


class World:
    """This rank's place among the ranks, its collectives and what they sent.

    `backend` is "single", "gloo", "nccl" or "simulated". `shard_mesh` is the shard axis as a
    DeviceMesh, None where that axis has one rank.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        backend: str,
        shard: Axis,
        replicate: Axis,
        whole: Axis,
        lane: Lane | None = None,
        shard_mesh: DeviceMesh | None = None,
    ) -> None:
        self.device = device
        self.backend = backend
        self.shard_rank, self.shard_size = shard.rank, shard.size
        self.replicate_rank, self.replicate_size = replicate.rank, replicate.size
        self.rank = replicate.rank * shard.size + shard.rank
        self.size = shard.size * replicate.size
        self.shard_mesh = shard_mesh
        self._shard, self._replicate, self._whole = shard, replicate, whole
        self._lane = lane
        self.counters = lane.counters if lane else {kind: Traffic() for kind in KINDS}

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> World:
        """Return the world of one process, without a process group."""
        return cls(
            device=torch.device(device or "cpu"),
            backend="single",
            shard=Axis(),
            replicate=Axis(),
            whole=Axis(),
        )

    @classmethod
    def connect(
        cls,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        shard_size: int | None = None,
        algorithm: Algorithm = always_direct,
    ) -> World:
        """Return the world this process is in; a collective call where there are several ranks.

        Uses the process group that exists; else, under torchrun, initialises one; else this is one
        process. `mesh` is 1-D (shard) or 2-D (replicate, shard); without one all ranks are used, in
        contiguous groups of `shard_size` that hold the shards, replicated across the groups.
        `algorithm` chooses how gloo moves the bytes of each collective.

        Raises:
            PlanError: the shape of the mesh, or `shard_size`, does not fit the ranks.
        """
        if not dist.is_initialized() and all(name in os.environ for name in _TORCHRUN):
            _initialise(device)
        if not dist.is_initialized():
            if mesh is not None or (shard_size or 1) != 1:
                raise PlanError(
                    f"shard_axis_size={shard_size} or a mesh was given, but this is one process; "
                    "launch with torchrun, or leave them out"
                )
            return cls.single(_device(device))
        grid = _grid(mesh, shard_size)
        if grid.numel() == 1:
            return cls.single(_device(device))
        return _join(cls, grid, _device(device), mesh, algorithm)

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        """Fill `out` [shard_size * k] with the `shard` [k] of every rank of the shard axis."""
        return self._shard.all_gather(out, shard, label)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        """Set `out` [k] to scale * the sum over all ranks of this rank's slice of `full`.

        The sum runs in rank order over the shard axis, then over the replicate axis.

        Shapes: full [shard_size * k]; `out` is no part of it where there are several ranks.
        """
        if self.replicate_size == 1:
            return self._shard.reduce_scatter(out, full, scale, label)
        if self.shard_size == 1:
            if out.data_ptr() != full.data_ptr():
                out.copy_(full)
            return self._replicate.all_reduce(out, scale, label)
        first = self._shard.reduce_scatter(out, full, 1.0, label)
        return Then(first, lambda: self._replicate.all_reduce(out, scale, label))

    def all_reduce(self, buf: Tensor, scale: float = 1.0, label: str = "all-reduce") -> Work:
        """Set `buf` in place to scale * the sum over all ranks, in rank order."""
        return self._whole.all_reduce(buf, scale, label)

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        """Set `buf` on every rank to its value on rank `src`."""
        return self._whole.broadcast(buf, src, label)

    def drain(self) -> None:
        """Wait for everything still in flight: after an exception, before buffers are used anew."""
        for work in list(self._lane.in_flight) if self._lane else ():
            work.wait()

    def agree(self, what: str, digest: str) -> None:
        """Return once every rank is about to do `what` with the same `digest`; else raise."""


def _device(device: torch.device | str | None) -> torch.device:
    """Return the given device, or CUDA's LOCAL_RANK-th where there is one, or the host."""
    if device is not None:
        return torch.device(device)
    on_cuda = torch.cuda.is_available()
    if dist.is_initialized():
        on_cuda = on_cuda and "nccl" in str(dist.get_backend())
    if not on_cuda:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def _initialise(device: torch.device | str | None) -> None:
    """Make the default process group from torchrun's environment, and say so."""
    place = _device(device)
    backend = "nccl" if place.type == "cuda" else "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(backend)
    log.info(
        "zerofx initialised torch.distributed with %s: rank %d of %d on %s",
        backend,
        dist.get_rank(),
        dist.get_world_size(),
        place,
    )


def _grid(mesh: DeviceMesh | None, shard_size: int | None) -> Tensor:
    """Return the global ranks as a [replicate, shard] grid."""
    if mesh is not None:
        if mesh.ndim > 2:
            raise PlanError(
                f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; pass the 1-D (shard) or 2-D "
                "(replicate, shard) submesh that data parallelism runs over"
            )
        grid = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
        if shard_size not in (None, grid.shape[1]):
            raise PlanError(
                f"shard_axis_size={shard_size} but the mesh's shard axis has {grid.shape[1]} ranks"
            )
        return grid
    size = dist.get_world_size()
    per_group = shard_size or size
    if size % per_group:
        raise PlanError(f"shard_axis_size={per_group} does not divide the {size} ranks")
    return torch.arange(size).reshape(-1, per_group)


def _join(
    cls: type[World],
    grid: Tensor,
    device: torch.device,
    mesh: DeviceMesh | None,
    algorithm: Algorithm,
) -> World:
    """Make the process groups of the grid's axes, in one order on every rank."""
    ranks = grid.tolist()
    place = (grid == dist.get_rank()).nonzero()
    if len(place) != 1:
        raise PlanError(f"rank {dist.get_rank()} is not on the mesh {ranks}")
    replicate_rank, shard_rank = (int(i) for i in place[0])
    backend = "nccl" if device.type == "cuda" else "gloo"
    everyone = [rank for row in ranks for rank in row]
    lane = Lane({kind: Traffic() for kind in KINDS}, {}, Watchdog())

    def axis(members: list[int], position: int) -> tuple[Axis, Any]:
        if len(members) == 1:
            return Axis(), None
        gathers, reduces = (_new_group(members, backend) for _ in range(2))
        if backend == "nccl":
            return NcclAxis(position, len(members), gathers, reduces, lane), gathers
        return (
            GlooAxis(position, len(members), gathers, reduces, lane, algorithm),
            gathers,
        )

    shard, group = axis(ranks[replicate_rank], shard_rank)
    replicate, _ = axis([row[shard_rank] for row in ranks], replicate_rank)
    if shard.size == 1 or replicate.size == 1:
        whole = replicate if shard.size == 1 else shard
    else:
        whole, _ = axis(everyone, replicate_rank * shard.size + shard.rank)
    shard_mesh = DeviceMesh.from_group(group, device.type) if group is not None else None
    return cls(
        device=device,
        backend=backend,
        shard=shard,
        replicate=replicate,
        whole=whole,
        lane=lane,
        shard_mesh=shard_mesh,
    )


def _new_group(members: list[int], backend: str) -> Any:
    """Make a group that only its members take part in making, with zerofx's timeout."""
    return dist.new_group(
        members,
        backend=backend,
        timeout=timedelta(seconds=timeout_s()),
        use_local_synchronization=True,
    )
