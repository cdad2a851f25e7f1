"""Meshes: the layout follows them at every stage; those that cannot be followed are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerofx
from zerofx.comm.grid import rank_grid
from zerofx.errors import DesyncError, PlanError

HSDP = "dp_replicate", "dp_shard"


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(mesh: DeviceMesh, plan: dict[str, Any]) -> tuple[float, int, int, int | None]:
    """Train on the mesh and, beside it, in one process.

    Returns:
        (largest difference of a value, ranks per shard axis, replicas, the plan's shard_axis_size)
    """
    plain, model = make(), zerofx.compile(make(), {"kernels": "aten", **plan}, mesh=mesh)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(mesh.size()):
            (plain(batch(step, rank)).square().mean() / mesh.size()).backward()
        model(batch(step, dist.get_rank())).square().mean().backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    found = model.state_dict()
    differ = max(float((found[k] - v).abs().max()) for k, v in plain.state_dict().items())
    world, settled = model._engine.world, model.programs[0].plan.shard_axis_size
    return differ, world.shard_size, world.replicate_size, settled


def train_on(cases: list[tuple[tuple[int, ...], Any, dict[str, Any]]]) -> list[Any]:
    """Train on every rank, on one mesh after the other."""
    return [
        train(
            init_device_mesh("cpu", shape, mesh_dim_names=names), {"differentiate": "all", **plan}
        )
        for shape, names, plan in cases
    ]


def test_the_layout_follows_the_mesh(pool: Pool) -> None:
    cases = [
        ((2, 1), HSDP, {}),
        ((1, 2), None, {"stage": 0}),
    ]
    for answers in pool.run(2, train_on, cases):
        assert [axes for _, *axes in answers] == [[1, 2, 1], [1, 2, None]]
        assert max(differ for differ, *_ in answers) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_layout_follows_meshes_of_four_ranks(pool: Pool, stage: int) -> None:
    cases = [
        ((2, 2), None, {"stage": stage}),
        ((2, 2), HSDP, {"stage": stage}),
        ((4,), ("data",), {"stage": stage}),
        ((4, 1), None, {"stage": stage}),
    ]
    axes = [[2, 2, 2], [2, 2, 2], [4, 1, None], [1, 4, 1]] if stage else [[1, 4, None]] * 4
    for answers in pool.run(4, train_on, cases):
        assert [found for _, *found in answers] == axes
        assert max(differ for differ, *_ in answers) < 1e-6


def grids() -> list[Any]:
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "replicate"))
    return [
        rank_grid(both, None)[0, ..., 0].tolist(),
        rank_grid(both, None, replicates=True)[0, ..., 0].tolist(),
        rank_grid(both["shard"], None)[0, ..., 0].tolist(),
        rank_grid(init_device_mesh("cpu", (2,)), 2)[0, ..., 0].tolist(),
        rank_grid(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), None, True)[
            0, ..., 0
        ].tolist(),
        rank_grid(None, None, tensor=2)[0].tolist(),
        rank_grid(None, None, pipeline=2).tolist(),
    ]


def test_names_give_the_axes_in_either_order(pool: Pool) -> None:
    for rank, answer in enumerate(pool.run(2, grids)):
        two = [[[0, 1]]]  # one data rank, whose layers both share
        stages = [[[[0]]], [[[1]]]]
        assert answer == [[[0], [1]], [[0], [1]], [[rank]], [[0, 1]], [[0], [1]], two, stages]


def refusals() -> list[str]:
    def said(shape: Any, names: Any, plan: Any = None, **options: Any) -> str:
        mesh = (
            init_device_mesh("cpu", shape, mesh_dim_names=names) if names != "of rank 0" else shape
        )
        with pytest.raises((PlanError, DesyncError)) as caught:
            zerofx.compile(make(), plan, mesh=mesh, **options)
        return str(caught.value)

    only_0, rank = DeviceMesh("cpu", [0]), dist.get_rank()
    return [
        said((2, 1), ("dp", "tp")),
        said((2, 1), ("node", "gpu")),
        said((2,), ("tp",)),
        said((2,), ("dp_replicate",)),
        said((1, 2, 1), (*HSDP, "tp")),
        said((1, 2), HSDP, {"shard_axis_size": 4}),
        said((2,), None, device="meta"),
        said(only_0, "of rank 0") if rank else "",
        said((1, 2) if rank else (2, 1), None),
    ]


def test_meshes_that_are_not_followed_are_refused_by_name(pool: Pool) -> None:
    answers = pool.run(2, refusals)
    for tensor, unknown, alone, replicas, cube, sizes, kind, _, other in answers:
        assert "an axis 'tp'" in tensor and "Pass mesh['dp']" in tensor
        assert "axes ('node', 'gpu')" in unknown and '("replicate", "shard")' in unknown
        assert "an axis 'tp'" in alone
        assert "no axis to shard over" in replicas and "Plan(stage=0)" in replicas
        assert "mesh['dp_replicate', 'dp_shard']" in cube
        assert "shard_axis_size is 4 but the mesh's shard axis has 2 ranks" in sizes
        assert "device is 'meta' but mesh is a mesh of 'cpu' devices" in kind
        assert "mesh" in other and "[[0], [1]]" in other and "[[0, 1]]" in other
    assert "this process is rank 1, and the mesh has ranks [0]" in answers[1][7]


def refused_before_anything_is_sharded() -> tuple[str, str]:
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError) as no_mesh:
        zerofx.compile(model, {"kernels": "aten"}, mesh=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(PlanError) as scaled:
        zerofx.compile(model, {"precision": "fp16"}, mesh=mesh["dp"])
    zerofx.compile(model, {"precision": "bf16", "kernels": "aten"}, mesh=mesh["dp"])
    return str(no_mesh.value), str(scaled.value)


def test_the_advice_of_a_refusal_can_be_followed(pool: Any) -> None:
    for no_mesh, scaled in pool.run(2, refused_before_anything_is_sharded):
        assert "not a DeviceMesh" in no_mesh and "bf16" in scaled
