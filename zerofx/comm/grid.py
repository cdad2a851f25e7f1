"""The grid of ranks over which a model is sharded and replicated: from a mesh, or from sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import PlanError

REPLICATE = ("replicate", "dp_replicate", "ddp", "hsdp_replicate")
SHARD = ("shard", "dp_shard", "dp_shard_cp", "fsdp", "hsdp_shard")
NOT_DATA = (
    "tp", "tensor", "tensor_parallel", "pp", "pipeline", "pipeline_parallel", "pipe", "stage",
    "cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel", "ep", "expert",
    "expert_parallel", "etp", "model",
)  # fmt: skip


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
            "out to use all ranks"
        )
    names = mesh.mesh_dim_names
    if mesh.ndim > 2:
        data = [name for name in names or () if name in REPLICATE + SHARD]
        which = f"mesh[{', '.join(map(repr, data[:2]))}]" if data else 'mesh["dp"]'
        raise PlanError(
            f"mesh has {mesh.ndim} axes {names}. Pass the 1-D (shard) or 2-D (replicate, shard) "
            f"submesh that data parallelism runs over, such as {which}"
        )
    if names is None:
        return
    wrong = [name for name in names if name in NOT_DATA]
    if wrong:
        others = [name for name in names if name not in wrong]
        fix = f"pass mesh[{others[0]!r}]" if others else "pass the mesh's data-parallel axis"
        raise PlanError(
            f"mesh has an axis {wrong[0]!r}, which is not one of data parallelism (axes: {names}). "
            f"zerofx shards and replicates over data-parallel ranks only; {fix}, or rename the axis"
        )
    if mesh.ndim == 2 and _roles(mesh) is None:
        raise PlanError(
            f"mesh has axes {names}, which do not say over which ranks zerofx replicates and over "
            'which it shards. Name them ("replicate", "shard") or ("dp_replicate", "dp_shard"), '
            "or pass a mesh without names, whose second axis shards"
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
                f"multiple of {shared} ranks"
            )
        size = world // (tensor * pipeline)
        per_group = 1 if replicates else shard_size or size
        if size % per_group:
            raise PlanError(
                f"shard_axis_size is {per_group}, which does not divide the {size} ranks. "
                f"Choose one of {[n for n in range(1, size + 1) if size % n == 0]}"
            )
        return torch.arange(world).reshape(pipeline, -1, per_group, tensor)
    check_mesh(mesh)
    ranks = mesh.mesh
    if dist.get_rank() not in ranks:
        raise PlanError(
            f"this process is rank {dist.get_rank()}, and the mesh has ranks {ranks.tolist()}. "
            "Call zerofx.compile on the ranks of the mesh only, or pass a mesh that has this one"
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
            'shard axis, such as mesh["dp_replicate", "dp_shard"]'
        )
    else:
        grid = ranks.reshape(1, -1)
    if shard_size not in (None, grid.shape[1]):
        raise PlanError(
            f"shard_axis_size is {shard_size} but the mesh's shard axis has {grid.shape[1]} "
            "ranks. Leave one of the two out"
        )
    return grid[None, ..., None]
