"""The grid of ranks over which a model is sharded and replicated: from a mesh, or from sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.compat.groups import root_mesh
from zerofx.errors import PlanError
from zerofx.layout.slices import Marks

REPLICATE = ("replicate", "dp_replicate", "ddp", "hsdp_replicate")
SHARD = ("shard", "dp_shard", "dp_shard_cp", "fsdp", "hsdp_shard")
NOT_DATA = (
    "tp", "tensor", "tensor_parallel", "pp", "pipeline", "pipeline_parallel", "pipe", "stage",
    "cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel", "ep", "expert",
    "expert_parallel", "etp", "model",
)  # fmt: skip
PIPELINE = ("pp", "pipeline", "pipeline_parallel", "pipe", "stage")
TENSOR = ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel", "etp")


def check_mesh(mesh: Any) -> None:
    """Check that `mesh` is a DeviceMesh whose axes can serve as replicate and shard axes.

    Raises:
        PlanError: it is something else, or an axis is not for data parallelism; the message names
            it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh is a {type(mesh).__name__}, not a DeviceMesh. Pass "
            "torch.distributed.device_mesh.init_device_mesh(device_type, shape), or leave mesh "
            "out to use all ranks."
        )
    names = mesh.mesh_dim_names
    if mesh.ndim > 2:
        data = [name for name in names or () if name in REPLICATE + SHARD]
        which = f"mesh[{', '.join(map(repr, data[:2]))}]" if data else 'mesh["dp"]'
        raise PlanError(
            f"mesh has {mesh.ndim} axes {names}. Pass the 1-D (shard) or 2-D (replicate, shard) "
            f"submesh that data parallelism runs over, such as {which}."
        )
    if names is None:
        return
    wrong = [name for name in names if name in NOT_DATA]
    if wrong:
        others = [name for name in names if name not in wrong]
        fix = f"Pass mesh[{others[0]!r}]" if others else "Pass the mesh's data-parallel axis"
        raise PlanError(
            f"mesh has an axis {wrong[0]!r}, which is not one of data parallelism (axes: {names}). "
            f"zerofx shards and replicates over data-parallel ranks only. {fix}, or rename it."
        )
    if mesh.ndim == 2 and _roles(mesh) is None:
        raise PlanError(
            f"mesh has axes {names}, which do not say over which ranks zerofx replicates and over "
            'which it shards. Name them ("replicate", "shard") or ("dp_replicate", "dp_shard"), '
            "or pass a mesh without names, whose second axis shards."
        )


def _roles(mesh: DeviceMesh) -> tuple[int, int] | None:
    """Return the (replicate, shard) dims of a 2-D mesh; None if its names do not tell."""
    names = mesh.mesh_dim_names
    if names is None:
        return 0, 1
    for replicate, shard in ((0, 1), (1, 0)):
        if names[replicate] in REPLICATE and names[shard] in SHARD:
            return replicate, shard
    return None


@dataclass(frozen=True)
class SliceAxis:
    """The axis over which a model's own slices lie, as a dimension of the mesh of all ranks."""

    root: DeviceMesh
    dim: int

    @property
    def size(self) -> int:
        return self.root.size(self.dim)

    @property
    def name(self) -> str:
        return (self.root.mesh_dim_names or ())[self.dim]

    def peers(self, rank: int) -> list[int]:
        """Return the ranks along the axis that differ from a rank in their slices only."""
        at: list[Any] = (self.root.mesh == rank).nonzero()[0].tolist()
        at[self.dim] = slice(None)
        return self.root.mesh[tuple(at)].tolist()  # type: ignore[no-any-return]


def slice_axis(mesh: DeviceMesh | None, marks: Marks) -> SliceAxis | None:
    """Return the axis of the slices that a model is marked with; None if it is not sliced here.

    DTensors name the axis themselves. Other slices lie over the one axis of the mesh that `mesh`
    was taken from which is not in `mesh` and not a pipeline's; of several, over the one called "tp"
    or "tensor".

    Raises:
        PlanError: there is no such axis for a DTensor, or there are several.
    """
    free = [] if mesh is None else free_axes(mesh)
    found = [axis for axis in free if axis.name not in PIPELINE]
    by_tensors: list[SliceAxis] = []
    for name, lies in marks.tensors.items():
        ranks = sorted(lies.mesh.mesh.flatten().tolist())
        if len(ranks) == 1:
            continue
        mine = [a for a in free if sorted(a.peers(dist.get_rank())) == ranks]
        if not mine:
            raise PlanError(
                f"{name} is a DTensor over ranks {ranks} (placements {lies.placements}), and "
                + ("mesh is not given" if mesh is None else f"mesh has ranks {_shown(mesh)}")
                + ". Slice both from one mesh: mesh = init_device_mesh(type, (data, tensor), "
                'mesh_dim_names=("dp", "tp")), parallelize_module(model, mesh["tp"], ...) and '
                'zerofx.compile(model, plan, mesh=mesh["dp"]).'
            )
        if name in marks.cuts and by_tensors and mine != by_tensors:
            raise PlanError(
                f"{name} is a slice over the mesh axis {mine[0].name}, and other parameters are "
                f"over {by_tensors[0].name}. zerofx takes the slices of one axis. Distribute all "
                "over one."
            )
        if name in marks.cuts:
            found = by_tensors = mine
    if not found or not marks.cuts:
        return None
    if len(found) > 1:
        named = [axis for axis in found if axis.name in TENSOR]
        if len(named) != 1:
            raise PlanError(
                f"{next(iter(marks.cuts))} is marked as a slice, and mesh was taken from a mesh "
                f"with the other axes {', '.join(axis.name for axis in found)}. Name the axis of "
                'the slices "tp" or "tensor".'
            )
        found = named
    return found[0]


def free_axes(mesh: DeviceMesh) -> list[SliceAxis]:
    """Return the axes of several ranks in the mesh that `mesh` was taken from, but not in it."""
    root, inside = root_mesh(mesh), set(mesh.mesh.flatten().tolist())
    found: list[SliceAxis] = []
    if not dist.is_initialized() or dist.get_rank() not in inside:
        return found  # refused when the grid is made
    for dim in range(len(root.mesh_dim_names or ())):
        axis = SliceAxis(root, dim)
        # a mesh that was unflattened from one axis has that as its root, which says nothing
        if axis.size > 1 and inside & {*axis.peers(dist.get_rank())} == {dist.get_rank()}:
            found.append(axis)
    return found


def _shown(mesh: DeviceMesh) -> str:
    return str(mesh.mesh.flatten().tolist())


def with_slices(grid: Tensor, axis: SliceAxis) -> Tensor:
    """Return the grid of data ranks with the peers of each along its last axis."""
    peers = [axis.peers(rank) for rank in grid.flatten().tolist()]
    return torch.tensor(peers).reshape(*grid.shape[:-1], axis.size)


def rank_grid(
    mesh: DeviceMesh | None, shard_size: int | None, replicates: bool = False, tensor: int = 1,
    pipeline: int = 1, context: int = 1,
) -> Tensor:  # fmt: skip
    """Return the global ranks as a [pipeline, replicate, shard, tensor] grid.

    A mesh without names is 1-D (shard) or 2-D (replicate, shard); names allow either order of the
    axes. Without a mesh, all ranks are used in contiguous groups of `shard_size`.

    replicates: nothing is sharded (stage 0): the shard axis has one rank, whatever the mesh.
    tensor: without a mesh, the number of neighbouring ranks that share each layer. pipeline:
        without a mesh, the number of pipeline stages, each with equally many ranks. context:
        without a mesh, the number of neighbouring ranks of a stage that share each sequence.

    Raises:
        PlanError: the mesh cannot be the grid or does not contain this rank, or `shard_size` does
            not fit the mesh or the number of ranks.
    """
    if mesh is None:
        world = dist.get_world_size()
        shared = tensor * pipeline * context
        if world % shared:
            said = {"tensor": tensor, "pipeline": pipeline, "context": context}
            axes = " x ".join(f"{axis} = {n}" for axis, n in said.items() if n > 1)
            raise PlanError(
                f"Plan.parallel has {axes}, which does not divide the {world} ranks. Start a "
                f"multiple of {shared} ranks."
            )
        size = world // (tensor * pipeline)
        per_group = 1 if replicates else shard_size or size
        if size % per_group:
            raise PlanError(
                f"shard_axis_size is {per_group}, which does not divide the {size} ranks. "
                f"Choose one of {[n for n in range(1, size + 1) if size % n == 0]}."
            )
        return torch.arange(world).reshape(pipeline, -1, per_group, tensor)
    check_mesh(mesh)
    ranks = mesh.mesh
    if dist.get_rank() not in ranks:
        raise PlanError(
            f"this process is rank {dist.get_rank()}, and the mesh has ranks {ranks.tolist()}. "
            "Call zerofx.compile on the ranks of the mesh only, or pass a mesh that has this one."
        )
    if replicates:
        return ranks.reshape(1, -1, 1, 1)
    if mesh.ndim == 2:
        roles = _roles(mesh)
        assert roles is not None, "check_mesh let it through"
        grid = ranks.permute(roles)
    elif mesh.mesh_dim_names is not None and mesh.mesh_dim_names[0] in REPLICATE:
        raise PlanError(
            f"mesh has one axis, {mesh.mesh_dim_names[0]!r}, of {ranks.numel()} replicas, and no "
            "axis to shard over. Use Plan(stage=0) to replicate over it, or pass a mesh with a "
            'shard axis, such as mesh["dp_replicate", "dp_shard"].'
        )
    else:
        grid = ranks.reshape(1, -1)
    if shard_size not in (None, grid.shape[1]):
        raise PlanError(
            f"shard_axis_size is {shard_size} but the mesh's shard axis has {grid.shape[1]} "
            "ranks. Leave one of the two out."
        )
    return grid[None, ..., None]
