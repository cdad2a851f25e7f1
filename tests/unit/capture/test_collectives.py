"""Collectives of torch.distributed in a forward: nodes of the program, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from zerofx.compat.groups import all_gather_flat, reduce_scatter_flat
from zerofx.errors import CaptureError

X = torch.arange(24.0).view(4, 6) / 8


def _joined(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.cat(parts, -1)


def _reduced(x: Tensor, op: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, op=op)
    return x


def _sent(x: Tensor) -> Tensor:
    x = x.clone()
    dist.broadcast(x, 1)
    return x


def _scattered(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    dist.reduce_scatter(out, [each.contiguous() for each in x.chunk(2, -1)])
    return out


def _swapped(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, async_op=True).wait()
    return out


def _uneven(x: Tensor) -> Tensor:
    rank = dist.get_rank()
    out = x.new_empty(2 + 4 * rank, 6) if rank == 0 else x.new_empty(6, 6)
    dist.all_to_all_single(out, x, [1 + 2 * rank] * 2, [1, 3])
    return out.sum(0)


def _gathered_flat(x: Tensor) -> Tensor:
    out = x.new_empty(2 * x.shape[0], x.shape[1])
    all_gather_flat(dist.group.WORLD, out, x).wait()
    return out


def _scattered_flat(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // 2, x.shape[1])
    reduce_scatter_flat(dist.group.WORLD, out, x).wait()
    return out


WAYS = {
    "all_gather": _joined,
    "sum": lambda x: _reduced(x, dist.ReduceOp.SUM),
    "max": lambda x: _reduced(x, dist.ReduceOp.MAX),
    "product": lambda x: _reduced(x, dist.ReduceOp.PRODUCT),
    "broadcast": _sent,
    "reduce_scatter": _scattered,
    "all_to_all_single": _swapped,
    "uneven all_to_all_single": _uneven,
    "flat all-gather": _gathered_flat,
    "flat reduce-scatter": _scattered_flat,
}


class Exchanging(nn.Module):
    """Applies a linear, and exchanges its outputs without a gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.way = nn.Linear(6, 6), way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.linear(x)
        with torch.no_grad():
            exchanged = WAYS[self.way](made)
        return made.square().mean(), exchanged


def exchange_in_both() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    x = X + dist.get_rank()
    for way in WAYS:
        plain = Exchanging(way)
        loss, expected = plain(x)
        loss.backward()
        model = zerofx.compile(Exchanging(way), {"kernels": "aten"}, mesh=mesh["dp"])
        loss, found = model(x)
        loss.backward()
        assert not model.zerofx.islands, way
        torch.testing.assert_close(found, expected, msg=lambda said, way=way: f"{way}: {said}")
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


def test_a_collective_is_part_of_the_program(pool: Pool) -> None:
    pool.run(2, exchange_in_both)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        dist.all_reduce(made.detach(), op=dist.ReduceOp.BAND)
        return made.sum()


def refused() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"kernels": "aten", "islands": "refuse"}
    model = zerofx.compile(Asking(), plan, mesh=mesh["dp"])
    with pytest.raises(CaptureError) as error:
        model(X)
    return str(error.value)


def test_an_operator_without_a_functional_form_is_named(pool: Pool) -> None:
    for said in pool.run(2, refused):
        assert "BAND" in said and "test_collectives.py" in said
