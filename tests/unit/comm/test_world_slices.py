"""A model on a slice of a larger mesh: what needs its ranks along the other axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import zerofx
import zerofx.optim
from zerofx.errors import PlanError, ShardError

X = torch.linspace(-1, 1, 12).view(3, 4)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().sum()


class Share(torch.autograd.Function):
    """The sum over tensor ranks, as Megatron's linears have it; its backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Part(nn.Module):
    """One tensor rank's rows of `up` and columns of `down`; every rank holds the bias."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        whole, rank, size = Whole(), mesh.get_local_rank(), mesh.size()
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        self.group = mesh.get_group().group_name

    def forward(self, x: Tensor) -> Tensor:
        out = Share.apply((x @ self.up.T).relu() @ self.down.T, self.group)
        return (out + self.bias).square().sum()


def clipped() -> tuple[str, str, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = zerofx.compile(Part(mesh["tensor"]), {"kernels": "aten"}, mesh=mesh["data"])
    model(X).backward()
    with pytest.raises(ShardError) as refused:
        clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ShardError) as unscaled:
        scaler.unscale_(sgd)
    squares = get_total_norm([model.up.grad, model.down.grad]) ** 2
    dist.all_reduce(squares, group=mesh["tensor"].get_group())
    norm = (squares + get_total_norm([model.bias.grad]) ** 2).sqrt()
    clip_grads_with_norm_(model.parameters(), 1.0, norm)
    return str(refused.value), str(unscaled.value), norm, model.bias.grad.full_tensor()


@pytest.mark.slow
def test_a_norm_over_a_slice_is_refused_and_can_be_summed(pool: Pool) -> None:
    plain = Whole()
    plain(X).backward()
    norm = clip_grad_norm_(plain.parameters(), 1.0)
    for refused, unscaled, found, bias in pool.run(4, clipped):
        assert (
            "clip_grad_norm_" in refused and "tensor (2)" in refused and "get_total_norm" in refused
        )
        assert "GradScaler" in unscaled and "bf16" in unscaled
        torch.testing.assert_close(found, norm)
        torch.testing.assert_close(bias, plain.down.bias.grad)


def alone_on_its_slice() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = zerofx.compile(Part(mesh["tensor"]), {"kernels": "aten"}, mesh=mesh["data"])
    optimizer = zerofx.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    model(X).backward()
    with pytest.raises(ShardError) as refused:
        optimizer.step()
    with pytest.raises(PlanError) as scaled:
        zerofx.compile(Part(mesh["tensor"]), {"precision": "fp16"}, mesh=mesh["data"])
    return str(refused.value), str(scaled.value)


def test_what_looks_at_all_gradients_is_refused_on_a_slice(pool: Pool) -> None:
    for refused, scaled in pool.run(2, alone_on_its_slice):
        assert "max_grad_norm" in refused and "tensor (2)" in refused
        assert "fp16" in scaled and "tensor (2)" in scaled
