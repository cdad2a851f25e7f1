"""Prices: kernels as they are fused, collectives over nodes, shares by measured curves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.analysis.time.kernels import (
    BATCH_NORM,
    CONVOLUTION,
    INPUT,
    LAYOUT,
    POINTWISE,
    POOL,
    PRODUCT,
    REDUCTION,
    WEIGHT,
    Kernel,
    kernels,
    region_key,
)
from zerofx.analysis.time.kernels import FORWARD as RESULT
from zerofx.analysis.time.prices import HIGH, LOW, Roofline, collective_us
from zerofx.analysis.time.steps import Lane
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.graphs import regions
from zerofx.ir.program import BACKWARD, FORWARD
from zerofx.layout.tiers import Tier


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


def program(**plan: Any) -> zerofx.ir.program.Planned:
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


class Images(nn.Module):
    """A first layer, a pool, a second layer and a third that goes the other way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 1, bias=False)
        self.back = nn.ConvTranspose2d(16, 4, 2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.max_pool2d(torch.relu(self.norm(self.first(x))), 3, 2, 1)
        return self.back(self.second(pooled)).square().mean()


def of_images(graph: str, compiled: bool = True, on_cpu: bool = True, **given: Any) -> list[Kernel]:
    model, x = Images(), torch.zeros(2, 3, 32, 32)
    if given:
        model, x = model.to(**given), x.to(**given)
    made = zerofx.rewrite(zerofx.capture(model, (x,)), {"stage": 0})
    each = regions(made.graph(graph)).values()
    return [k for nodes in each for k in kernels(nodes, compiled, on_cpu)]


def test_each_pass_of_a_convolution_is_a_kernel() -> None:
    """A first layer's input needs no gradient; a transposed one's passes change places."""
    forward, backward = (
        [k for k in of_images(g) if k.kind == CONVOLUTION] for g in (FORWARD, BACKWARD)
    )
    passes = [k.convolution for k in (*forward, *backward)]
    found = sorted((p.weight_numel, p.direction, p.rows) for p in passes if p is not None)
    rows = 2 * 16 * 16, 2 * 8 * 8, 2 * 8 * 8
    first, second, back = 3 * 8 * 49, 8 * 16, 16 * 4 * 4
    assert found == sorted([
        (first, RESULT, rows[0]), (first, WEIGHT, rows[0]),
        (second, RESULT, rows[1]), (second, INPUT, rows[1]), (second, WEIGHT, rows[1]),
        (back, INPUT, rows[2]), (back, RESULT, rows[2]), (back, WEIGHT, rows[2]),
    ])  # fmt: skip
    for kernel in (*forward, *backward):
        assert kernel.convolution is not None
        assert kernel.flops == 2 * kernel.convolution.rows * kernel.convolution.weight_numel
        assert kernel.convolution.is_pointwise == (kernel.convolution.weight_numel == second)


def test_what_is_convolved_with_channels_last_is_copied_before() -> None:
    """Images and weights, unless they lie so: a window of one pixel has but one order."""
    copies = [k.nbytes for k in of_images(FORWARD) if k.kind == LAYOUT]
    first = 2 * (2 * 3 * 32 * 32 + 3 * 8 * 49) + 2 * 8 * 16 * 16
    second, back = 2 * 2 * 8 * 8 * 8 + 2 * 16 * 8 * 8, 2 * (2 * 16 * 8 * 8 + 16 * 4 * 4)
    assert copies[:2] == [4 * first, 4 * second]
    assert copies[2] in (4 * back, 4 * (back + 2 * 4 * 16 * 16))
    assert not [k for k in of_images(FORWARD, compiled=False) if k.kind == LAYOUT]
    assert not [k for k in of_images(FORWARD, on_cpu=False) if k.kind == LAYOUT]
    last = of_images(FORWARD, memory_format=torch.channels_last)
    assert sum(k.nbytes for k in last if k.kind == LAYOUT) < sum(copies) / 2


def test_pools_are_weighed_by_their_windows() -> None:
    (pool,) = [k for k in of_images(FORWARD) if k.kind == POOL]
    assert pool.window_numel == 2 * 8 * 8 * 8 * 9
    here = hardware(curves={"pool.inductor": [[1000, 2.0]]}, device_type="cpu")
    assert Roofline(here).kernel_us(pool) == pytest.approx(pool.window_numel / 2.0)
    assert [k.kind for k in of_images(FORWARD, compiled=False)].count(BATCH_NORM) == 1
    assert BATCH_NORM not in [k.kind for k in of_images(BACKWARD)]


def test_convolutions_are_priced_between_measured_channels() -> None:
    second = next(
        k for k in of_images(FORWARD) if k.convolution is not None and k.convolution.is_pointwise
    )
    start = "convolution.fp32.forward.1x1"  # 8 in and 16 out are as much as 11.3 of each
    curves = {f"{start}.8": [[128, 0.1]], f"{start}.16": [[128, 0.4]], f"{start}.8.2": [[128, 0.3]]}
    here = hardware(dense_flops_per_s={"fp32": 1e9}, curves=curves, memory_bytes_per_s=1e15)
    assert Roofline(here).kernel_us(second) == pytest.approx(second.flops / 0.2 / 1e3)
    beside = Roofline(here, world_size=2).kernel_us(second)
    assert beside == pytest.approx(second.flops / (0.3 * 0.4) ** 0.5 / 1e3)
    other = dataclasses.replace(here, curves={"convolution.fp32.weight.1x1.8": [[128, 0.1]]})
    assert Roofline(other).kernel_us(second) == pytest.approx(second.flops / 0.7 / 1e3)
    for name in ("convolution.fp32", "convolution.fp32.forward.5x5.8"):
        with pytest.raises(PlanError, match=r"not named convolution\.FORMAT\.PASS.*Measure it"):
            hardware(curves={name: [[128, 0.1]]})


def of_call(target: Any, *shapes: tuple[int, ...], **kwargs: Any) -> Kernel:
    """Return the kernel of a call; shapes of tensors, or other arguments as they are."""
    graph = torch.fx.Graph()

    def made(given: Any) -> Any:
        if not isinstance(given, tuple):
            return given
        node = graph.placeholder("x")
        is_rows = given[-1:] == ("rows",)
        node.meta["val"] = (
            torch.zeros(given[0], dtype=torch.long) if is_rows else torch.zeros(given)
        )
        return node

    args = tuple(map(made, shapes))
    node = graph.call_function(target, args, kwargs)
    real = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
    node.meta["val"] = target(*real, **kwargs)
    (kernel,) = kernels([node], compiled=False)
    return kernel


def test_functions_of_elements_have_their_own_rates() -> None:
    """A tanh takes as long as three sigmoids; its backward and a square only multiply."""
    here = hardware(curves={"heavy.aten": [[1, 4.0]], "heavy.aten.tanh": [[1, 1.0]]})
    prices, aten = Roofline(here, compiled=False), torch.ops.aten
    assert prices.kernel_us(of_call(aten.tanh.default, (100,))) == pytest.approx(100.0)
    assert prices.kernel_us(of_call(aten.sigmoid.default, (100,))) == pytest.approx(25.0)
    assert prices.kernel_us(of_call(aten.sin.default, (100,))) == pytest.approx(25.0)
    assert of_call(aten.gelu.default, (100,)).functions == (("erf", 100),)
    assert of_call(aten.gelu.default, (100,), approximate="tanh").functions == (("tanh", 100),)
    assert of_call(aten.pow.Tensor_Scalar, (100,), 1.7).functions == (("pow", 100),)
    for target, more in (
        (aten.tanh_backward.default, (100,)),
        (aten.pow.Tensor_Scalar, 3.0),
        (aten.logical_not.default, None),
    ):
        args = ((100,), more) if more is not None else ((100,),)
        assert not of_call(target, *args).functions, target


def test_a_loss_of_labels_reads_one_element_per_row() -> None:
    aten = torch.ops.aten
    loss = of_call(aten.nll_loss_forward.default, (64, 1000), (64, "rows"), None, 1, -100)
    assert loss.nbytes < 1000
    grads = of_call(aten.nll_loss_backward.default, (), (64, 1000), (64, "rows"), None, 1, -100, ())
    assert grads.kind == POINTWISE
    assert grads.nbytes == 64 * 1000 * 4 + 64 * 8 + 2 * 4


def test_attentions_of_many_samples_have_the_rate_of_one() -> None:
    """Short sequences are slow, and more of them are no faster."""
    here = hardware(
        dense_flops_per_s={"fp32": 1e9},
        curves={"attention.fp32": [[4 * 4 * 16 * 16 * 8, 0.1], [1e9, 1.0]]},
    )
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for samples, heads in ((1, 4), (8, 4), (1, 32)):
        shape = (samples, heads, 16, 8)
        attention = of_call(flash.default, shape, shape, shape)
        assert attention.flops == samples * heads * 4 * 16 * 16 * 8
        us = Roofline(here, compiled=False).kernel_us(attention)
        assert us == pytest.approx(attention.flops / 0.1 / 1e3)


def test_ranks_that_compute_at_once_take_longer() -> None:
    """What they take from each other is said once, for whole regions of one rank alone."""
    nodes = next(iter(regions(program().graph(FORWARD)).values()))
    curves = {"matmul.fp32": [[1, 0.5]], "matmul.fp32.2": [[1, 0.1]]}
    alone = hardware(curves=curves, dense_flops_per_s={"fp32": 1e12})
    crowded = dataclasses.replace(alone, curves={**curves, "crowd": [[1, 1.0], [4, 1.44]]})
    one = Roofline(crowded).region(nodes).us
    assert one == pytest.approx(Roofline(alone).region(nodes).us)
    assert Roofline(crowded, 2).region(nodes).us == pytest.approx(1.2 * one)
    assert Roofline(crowded, 64).region(nodes).us == pytest.approx(1.44 * one)
    product = next(k for k in found(True) if k.kind == PRODUCT)
    assert Roofline(alone, 2).kernel_us(product) > 4 * Roofline(crowded, 2).kernel_us(product)


def test_what_was_made_long_before_comes_from_memory() -> None:
    """Ranks of a node share its memory; regions read what caches still hold."""
    here = hardware(
        device_type="cpu", memory_bytes_per_s=20e9, host_memory_bytes_per_s=30e9, launch_us=0.0,
        curves={"memory.pointwise.inductor": [[1000, 5.0]]},
    )  # fmt: skip
    assert Roofline(here).touch(20_000).us == pytest.approx(1.0)
    assert Roofline(here, world_size=2).touch(15_000).us == pytest.approx(1.0)
    passed = Kernel(POINTWISE, 0.0, 100_000)
    assert Roofline(here).kernel_us(passed) == pytest.approx(1.0)


def test_an_all_to_all_is_priced_by_its_curve_or_a_gathers() -> None:
    """Ranks send each other as much as in an all-gather of as many bytes."""
    gathers = {"all_gather.direct.2": [[1000, 7.0]], "beside.all_gather.2": [[1000, 3.0]]}
    here = hardware(curves=gathers, device_type="cpu")
    assert collective_us(here, "all_to_all", 1000, 2, 1) == pytest.approx(7.0)
    assert Roofline(here, 2).beside("all_to_all", 1000, 2).us == pytest.approx(3.0)
    own = dataclasses.replace(here, curves={**gathers, "all_to_all.direct.2": [[1000, 9.0]]})
    assert collective_us(own, "all_to_all", 1000, 2, 1) == pytest.approx(9.0)


def test_a_collective_between_pieces_of_compute_has_its_own_curve() -> None:
    """Without one, and on a GPU, it takes as long as any other."""
    plain = {"all_gather.direct.2": [[1000, 7.0]]}
    curves = {**plain, "between.all_gather.2": [[1000, 20.0]]}
    here = hardware(curves=curves, device_type="cpu")
    assert Roofline(here, 2).exchange("all_gather", 1000, 2, 1).us == pytest.approx(20.0)
    assert Roofline(here, 2).exchange("all_to_all", 1000, 2, 1).us == pytest.approx(20.0)
    assert Roofline(here, 4).exchange("all_gather", 1000, 4, 1).us == pytest.approx(60.0)
    assert Roofline(here, 2).collective("all_gather", 1000, 2, 1).us == pytest.approx(7.0)
    for without in (hardware(curves=plain, device_type="cpu"), hardware(curves=curves)):
        assert Roofline(without, 2).exchange("all_gather", 1000, 2, 1).us == pytest.approx(7.0)


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


def test_between_nodes_the_network_is_the_bound_of_a_curve() -> None:
    """Curves are measured within a node; over TCP, 95 % of a slow link's rate carries payload."""
    curves = {"all_gather.direct.2": ((1e5, 100.0), (1e7, 10_000.0))}
    near = hardware(curves=curves, backend="gloo", devices_per_node=2)
    assert collective_us(near, "all_gather", 10**7, 2, 1) == pytest.approx(10_000.0)
    apart = {"devices_per_node": 1, "network_latency_us": 0.0, "backend": "gloo"}
    slow = hardware(curves=curves, network_bytes_per_s=12.5e6, **apart)
    ring_us = 1e6 * 10**7 / 2 / (12.5e6 * 0.95)
    assert collective_us(slow, "all_gather", 10**7, 2, 1) == pytest.approx(ring_us)
    fast = hardware(curves=curves, network_bytes_per_s=1e12, **apart)
    assert collective_us(fast, "all_gather", 10**7, 2, 1) == pytest.approx(10_000.0)


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
