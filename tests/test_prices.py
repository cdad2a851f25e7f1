"""Prices: kernels as they are fused, collectives over nodes, shares by measured curves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.analysis.kernels import POINTWISE, PRODUCT, REDUCTION, kernels, region_key
from zerofx.analysis.links import collective_us
from zerofx.analysis.prices import HIGH, LOW, Roofline
from zerofx.analysis.steps import Lane
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.graphs import regions
from zerofx.ir.program import BACKWARD, FORWARD
from zerofx.runtime.tiers import Tier


def hardware(**changes: Any) -> Hardware:
    """Return round figures: 4 devices a node, links of 100 GB/s, ports of 50, no latency."""
    given = {
        "devices_per_node": 4, "node_link_bytes_per_s": 100e9 / 0.85, "node_latency_us": 0.0,
        "network_bytes_per_s": 50e9 / 0.85, "network_latency_us": 0.0, "curves": {},
        "memory_bytes_per_s": 1e12, "sources": {},
    }  # fmt: skip
    return dataclasses.replace(load_hardware("dgx-h100"), **{**given, **changes})


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).sum()


def program(**plan: Any) -> zerofx.ir.program.Program:
    captured = zerofx.capture(Mlp(), (torch.zeros(32, 64),))
    return zerofx.rewrite(captured, {"stage": 0, **plan})


def found(compiled: bool, graph: str = FORWARD) -> list:
    each = regions(program().graph(graph)).values()
    return [k for nodes in each for k in kernels(nodes, compiled)]


def test_op_by_op_every_node_is_a_kernel() -> None:
    kinds = [k.kind for k in found(compiled=False)]
    assert kinds.count(PRODUCT) == 2
    assert kinds.count(REDUCTION) == 2  # the norm and the sum
    assert kinds.count(POINTWISE) == 2  # relu and the residual
    flops = sum(k.flops for k in found(compiled=False))
    assert flops == 2 * 2 * 32 * 64 * 256
    relu = next(k for k in found(compiled=False) if k.kind == POINTWISE)
    assert relu.nbytes == 2 * 32 * 256 * 4


def test_what_stands_between_products_is_fused() -> None:
    """The residual and the sum are one group: it reads both terms once and writes a number."""
    apart, fused = found(compiled=False), found(compiled=True)
    assert [k.flops for k in fused if k.flops] == [k.flops for k in apart if k.flops]
    assert len(fused) == len(apart) - 1
    assert sum(k.nbytes for k in fused) < sum(k.nbytes for k in apart)
    last = fused[-1]
    assert last.kind == REDUCTION
    assert last.nbytes == 2 * 32 * 64 * 4 + 4


def test_backward_multiplies_twice_as_much() -> None:
    forward, backward = (sum(k.flops for k in found(True, g)) for g in (FORWARD, BACKWARD))
    assert backward == 2 * forward


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    here = hardware(dense_flops_per_s={"fp32": 1e12})
    product = next(k for k in found(True) if k.kind == PRODUCT)
    us = Roofline(here).kernel_us(product)
    assert us == pytest.approx(1e6 * product.flops / (0.7 * 1e12))
    slow = dataclasses.replace(here, memory_bytes_per_s=1e6)
    assert Roofline(slow).kernel_us(product) == pytest.approx(product.nbytes / 0.85)


def test_measured_shares_come_before_assumed_ones() -> None:
    product = next(k for k in found(True) if k.kind == PRODUCT)
    here = hardware(
        dense_flops_per_s={"fp32": 1e12},
        curves={"matmul.fp32": [[product.flops / 2, 0.1], [product.flops * 2, 0.4]]},
    )
    assert Roofline(here).kernel_us(product) == pytest.approx(product.flops / (0.2 * 1e6))


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "seconds"),
    [
        ("all_gather", 4, 1, 0.75 * 1 / 100),  # within a node: links alone
        ("all_gather", 8, 1, 0.5 * 1 / 50),  # two nodes: half passes the ports
        ("reduce_scatter", 8, 1, 0.5 * 1 / 50),
        ("all_reduce", 8, 1, 2 * 0.5 * 1 / 50),
        ("all_gather", 4, 4, 0.75 * 1 / (50 / 4)),  # replicas: each node's ports serve four rings
        ("all_gather", 2, 2, 0.5 * 1 / 100),  # replicas within a node
    ],
)
def test_rings_over_links_and_ports(kind: str, ranks: int, stride: int, seconds: float) -> None:
    us = collective_us(hardware(), kind, 10**9, ranks, stride)
    assert us == pytest.approx(1e6 * seconds, rel=1e-6)


def test_little_is_all_reduced_by_a_tree() -> None:
    here = hardware(network_latency_us=10.0)
    ring = 2 * 64 * 10.0
    assert collective_us(here, "all_reduce", 8, 256, 1) == pytest.approx(2 * 6 * 10.0, abs=0.1)
    assert collective_us(here, "all_reduce", 8, 256, 1) < ring


def test_a_measured_collective_is_stretched_to_other_worlds() -> None:
    here = hardware(curves={"all_gather.direct.2": [[1000, 10.0], [100_000, 100.0]]})
    assert collective_us(here, "all_gather", 100_000, 2, 1) == pytest.approx(100.0)
    assert collective_us(here, "all_gather", 100_000, 4, 1) == pytest.approx(150.0)
    assert collective_us(here, "all_gather", 200_000, 2, 1) == pytest.approx(200.0)


def test_ranks_of_a_node_share_its_links_and_disks() -> None:
    here = dataclasses.replace(
        hardware(), host_link_bytes_per_s=12e9, node_host_link_bytes_per_s=24e9,
        nvme_read_bytes_per_s=8e9, host_update_elements_per_s=4e9,
    )  # fmt: skip
    alone, all_four = Roofline(here, 1), Roofline(here, 64)
    assert alone.copy(Lane.H2D, 12 * 10**6).us == pytest.approx(1000)
    assert all_four.copy(Lane.H2D, 12 * 10**6).us == pytest.approx(2000)
    assert all_four.copy(Lane.NVME, 10**6).us == pytest.approx(500)
    assert all_four.update(Tier.HOST, 10**6).us == pytest.approx(1000)


def test_equal_regions_are_priced_once() -> None:
    nodes = list(regions(program().graph(FORWARD)).values())
    again = list(regions(program().graph(FORWARD)).values())
    prices = Roofline(hardware())
    assert [prices.region(n) for n in nodes] == [prices.region(n) for n in again]
    assert len(prices.known) == len({region_key(n) for n in nodes}) == len(nodes)


def test_ranges_are_under_thirty_percent_wide() -> None:
    assert HIGH - LOW < 0.3
    price = Roofline(hardware()).touch(10**9)
    assert (price.low_us, price.high_us) == (LOW * price.us, HIGH * price.us)
