"""The cost model: the time of compute, transfers and updates on a hardware.

Passes, predictions and searches all use it. A kernel takes the longer of its arithmetic and its
memory traffic, each at the fraction of the nominal rate that the hardware's curves give for its
size. Curves are optional: each constant below names the curve that it replaces.

A collective takes its measured time or, without a measurement, latency plus size over bandwidth.
One of values, which compute waits for, takes the time measured between two pieces of compute. On
equal slices, a ring all-gather or reduce-scatter of n bytes passes n * (w - 1) / w through each
rank, and n * (nodes - 1) / nodes through each node's ports; an all-reduce is one of each. Small
all-reduces use a tree, whose latency grows only with the logarithm. Traffic within nodes runs at
the speed of their links, concurrently with the traffic between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.analysis.time.kernels import (
    ATTENTION,
    PRODUCT,
    WINDOWS,
    ConvolutionPass,
    Kernel,
    kernels,
    region_key,
)
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import Price
from zerofx.errors import UnpricedError
from zerofx.hardware import Curve, Hardware
from zerofx.layout.tiers import Tier
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes

_US = 1e6  # microseconds per second
# The fraction of a link's rate that large messages reach: under NCCL; and over TCP, where 1,448 of
# a frame's 1,514 bytes are payload.
LINK_SHARE = {"nccl": 0.85, "gloo": 0.95}
# From the middle of a price to its bounds: together below the 30 % that a range may span.
LOW, HIGH = 0.87, 1.15
FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Without a curve: the fraction of a data sheet's rates that large products and streaming kernels
# reach.
PRODUCT_SHARE, MEMORY_SHARE = 0.7, 0.85
# Without a curve: the rate of an attention kernel relative to a product of as many operations.
ATTENTION_SHARE = 0.6
ATTENTION_HEADS = 4  # of the attention of one sample that a curve is measured with
ADAM_BYTES = 28  # per element: reads parameter, gradient, two moments; writes all but the gradient
# The fixed cost of calls, in launches: guards, agreement between ranks, autograd, results.
CALLS = {"forward": 12, "backward": 12, "step": 8}


@dataclass
class Roofline:
    """Prices of one plan's tasks on one hardware; equal regions are priced once.

    compiled: regions are compiled by Inductor; otherwise they run op by op.
    """

    hardware: Hardware
    world_size: int = 1
    compiled: bool = True
    known: dict[tuple, Price] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, plan: Plan, hardware: Hardware, world_size: int) -> Roofline:
        """Return the prices of a plan's tasks, with its regions run as the plan says."""
        is_compiled = plan.kernels != "aten" and not plan.debug
        return cls(hardware, world_size, is_compiled)

    @property
    def is_inline(self) -> bool:
        return self.hardware.device_type == "cpu"

    @property
    def sharing(self) -> int:
        """The number of ranks per node, which share its host, its disks and its network."""
        return min(self.world_size, self.hardware.devices_per_node)

    def _curve(self, name: str) -> Curve | None:
        """Return a curve, if possible the one measured with as many ranks as share a node."""
        beside = self.hardware.curve(f"{name}.{self.sharing}") if self.sharing > 1 else None
        return beside or self.hardware.curve(name)

    @property
    def _crowd(self) -> float:
        """The slowdown of a region by the other ranks of its node."""
        curve = self.hardware.curve("crowd")
        return 1.0 if curve is None else curve.at(self.sharing)

    def _alone(self, name: str) -> Curve | None:
        """Return the curve of a single rank if the slowdown by other ranks is known."""
        is_known = self.hardware.curve("crowd") is not None
        return self.hardware.curve(name) if is_known else self._curve(name)

    def region(self, nodes: Sequence[fx.Node]) -> Price:
        key = region_key(nodes)
        if key not in self.known:
            self.known[key] = self._region(kernels(nodes, self.compiled, self.is_inline))
        return self.known[key]

    def _region(self, found: Sequence[Kernel]) -> Price:
        us = sum(map(self.kernel_us, found)) * self._crowd
        if self.is_inline and not self._calls_are_known:
            us += self.hardware.launch_us
        flops = sum(k.flops for k in found)
        return _price(us, sum(k.nbytes for k in found), flops, max(len(found), 1))

    @property
    def _calls_are_known(self) -> bool:
        """Return whether a measured curve of whole calls includes the cost of a region's call."""
        return any(name.startswith("call.") for name in self.hardware.curves)

    def node_us(self, node: fx.Node) -> float:
        """Return the time of one node by itself; views and parts of results take none."""
        return sum(map(self.kernel_us, kernels([node], self.compiled, self.is_inline)))

    def kernel_us(self, kernel: Kernel) -> float:
        """Return the longer of a kernel's arithmetic and its memory traffic."""
        arithmetic = 0.0
        if kernel.flops:
            form = FORMATS.get(kernel.dtype, "fp32")
            rates = self.hardware.dense_flops_per_s
            rate = rates.get(form) or rates[next(iter(rates))]
            arithmetic = kernel.flops / (rate * self._product_share(kernel, form))
        traffic = kernel.nbytes / self._memory_rate(kernel.kind, max(kernel.nbytes, 1))
        pool = self._alone(f"pool.{self._how}")
        windows, functions = 0.0, 0.0
        if pool is not None and kernel.window_numel:
            windows = kernel.window_numel / pool.at(kernel.window_numel)
        if not kernel.flops:
            functions = sum(self._function_us(*each) for each in kernel.functions)
        least = self.hardware.launch_us if self.is_inline and not self.compiled else 0.0
        return max(_US * max(arithmetic, traffic), windows, functions, least)

    def _function_us(self, function: str, numel: int) -> float:
        """Return the time of a function of each element: by its own curve, or by exp's."""
        names = (f"heavy.{self._how}.{function}", f"heavy.{self._how}")
        curve = next((c for c in map(self._alone, names) if c is not None), None)
        return 0.0 if curve is None else numel / curve.at(numel)

    @property
    def _how(self) -> str:
        return "inductor" if self.compiled else "aten"

    def _product_share(self, kernel: Kernel, form: str) -> float:
        grid = self._grid(kernel.convolution, form) if kernel.convolution else None
        if grid is not None:
            return grid
        own = self._alone(f"{kernel.kind}.{form}")
        if own is not None:
            # more heads and samples are more calls of the same size
            size = 4.0 * ATTENTION_HEADS * kernel.attended
            return own.at(size if kernel.attended else kernel.flops)
        product = self._alone(f"{PRODUCT}.{form}")
        share = PRODUCT_SHARE if product is None else product.at(kernel.flops)
        return share * (ATTENTION_SHARE if kernel.kind == ATTENTION else 1.0)

    def _grid(self, found: ConvolutionPass, form: str) -> float | None:
        """Return a convolution's share, interpolated by weight between curves of pass and
        window."""
        start = f"convolution.{form}.{found.direction}.{found.window}."
        ends = (name[len(start) :] for name in self.hardware.curves if name.startswith(start))
        points = [
            (float(channels) ** 2 * WINDOWS[found.window], curve.at(found.rows))
            for channels in sorted({int(end.partition(".")[0]) for end in ends})
            if (curve := self._alone(f"{start}{channels}")) is not None
        ]
        return Curve(tuple(points)).at(found.weight_numel) if points else None

    def _memory_rate(self, kind: str, nbytes: int) -> float:
        names = (f"memory.{kind}.{self._how}", f"memory.pointwise.{self._how}")
        curve = next((c for c in map(self._alone, names) if c is not None), None)
        share = MEMORY_SHARE if curve is None else curve.at(max(nbytes, 1))
        return self.hardware.memory_bytes_per_s * share

    def launch(self, calls: int) -> Price:
        return _price(calls * self.hardware.launch_us, calls=calls)

    def call(self, graph: str, regions: int, ranks: int) -> Price:
        curve = self.hardware.curve(f"call.{graph}.{min(ranks, 2)}")
        if curve is not None:
            return _price(_line(curve, regions), calls=0)
        return _price(CALLS[graph] * self.hardware.launch_us, calls=CALLS[graph])

    def touch(self, nbytes: int, tier: Tier = Tier.DEVICE) -> Price:
        """Price a pass over memory that was written long before, so that no cache holds it."""
        rate = self.hardware.host_memory_bytes_per_s * MEMORY_SHARE / self.sharing
        if tier is Tier.DEVICE:
            rate = self._streaming_rate(nbytes)
        own = self.hardware.launch_us if self.is_inline else 0.0
        return _price(_US * nbytes / rate + own, nbytes)

    def _streaming_rate(self, nbytes: int) -> float:
        """Return the bytes per second of a pass over device memory that is in no cache."""
        if not self.is_inline:
            return self._memory_rate("copy", nbytes)
        alone = self.hardware.memory_bytes_per_s
        return min(alone, self.hardware.host_memory_bytes_per_s / self.sharing)

    def collective(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        return _price(collective_us(self.hardware, kind, nbytes, ranks, stride), nbytes)

    def exchange(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        for each in alike(kind) if self.is_inline else ():
            found = nearest_world(self.hardware, f"between.{each}.", ranks)
            if found is not None and Axis.of(self.hardware, ranks, stride).nodes == 1:
                return _price(found.curve.time_at(max(nbytes, 1)) * found.direct(ranks), nbytes)
        return self.collective(kind, nbytes, ranks, stride)

    def beside(self, kind: str, nbytes: int, ranks: int) -> Price:
        curves = (nearest_world(self.hardware, f"beside.{k}.", ranks) for k in alike(kind))
        found = next((each for each in curves if each is not None), None)
        if not self.is_inline:
            return _price(0.0)
        if found is None:  # the compute cores also send
            return _price(collective_us(self.hardware, kind, nbytes, ranks, 1))
        return _price(found.curve.time_at(max(nbytes, 1)) * found.direct(ranks))

    def arrival(self, nbytes: int, ranks: int) -> Price:
        found = nearest_world(self.hardware, "arrival.", ranks)
        if self.is_inline and found is not None:
            return _price(found.curve.time_at(max(nbytes, 1)) * found.direct(ranks))
        return self.touch((1 + ranks if self.is_inline else 2) * nbytes)

    def copy(self, lane: Lane, nbytes: int) -> Price:
        hardware = self.hardware
        if lane in (Lane.H2D, Lane.D2H):
            shared = hardware.node_host_link_bytes_per_s / self.sharing
            rate = min(hardware.host_link_bytes_per_s, shared)
            curve = self._curve("host_copy")
        else:
            reads = lane is Lane.NVME
            whole = hardware.nvme_read_bytes_per_s if reads else hardware.nvme_write_bytes_per_s
            if not whole:
                raise UnpricedError(
                    f"the plan moves {format_bytes(nbytes)} at a time {'from' if reads else 'to'} "
                    f"NVMe, and {hardware.name} has none. Use another tier, or hardware "
                    "with NVMe rates (zerofx doctor --calibrate measures this machine's)."
                )
            rate = whole / self.sharing
            curve = hardware.curve("nvme_read" if reads else "nvme_write")
        share = 1.0 if curve is None else curve.at(max(nbytes, 1))
        return _price(_US * nbytes / (rate * share), nbytes)

    def update(self, tier: Tier, numel: int) -> Price:
        if tier is Tier.DEVICE and not self.is_inline:
            return self.touch(ADAM_BYTES * numel)
        curve = self._curve("host_update")
        share = 1 / self.sharing if curve is None else curve.at(max(numel, 1))
        rate = self.hardware.host_update_elements_per_s * share
        return _price(_US * numel / rate, ADAM_BYTES * numel)


def _line(curve: Curve, x: float) -> float:
    """Return the value at `x` on the line through the first and the last point of a curve."""
    (x0, v0), (x1, v1) = curve.points[0], curve.points[-1]
    return v0 if x1 == x0 else max(v0 + (x - x0) * (v1 - v0) / (x1 - x0), 0.0)


def _price(us: float, nbytes: int = 0, flops: float = 0.0, calls: int = 1) -> Price:
    return Price(LOW * us, us, HIGH * us, nbytes, flops, calls)


# -- collectives ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Axis:
    """The distribution of a collective's ranks over nodes.

    within: ranks of the axis per node. nodes: the number of nodes. beside: equal axes
        that use one node's ports at the same time.
    """

    within: int
    nodes: int
    beside: int

    @classmethod
    def of(cls, hardware: Hardware, ranks: int, stride: int) -> Axis:
        """Place `ranks` ranks, each `stride` from the next, on nodes that are filled in order."""
        per_node = hardware.devices_per_node
        within = min(ranks, max(per_node // stride, 1))
        return cls(within, math.ceil(ranks / within), min(stride, per_node))


def collective_us(hardware: Hardware, kind: str, nbytes: int, ranks: int, stride: int) -> float:
    """Return the time of a collective over `ranks` ranks, from launch to delivery."""
    if ranks == 1:
        return 0.0
    axis = Axis.of(hardware, ranks, stride)
    measured = _measured_us(hardware, kind, nbytes, ranks)
    if measured is not None and axis.nodes == 1:
        return measured
    predicted = _predicted_us(hardware, kind, nbytes, ranks, axis)
    # Curves are measured on one node: there a message takes as long, whatever the network adds.
    return max(measured or 0.0, predicted)


def _predicted_us(hardware: Hardware, kind: str, nbytes: int, ranks: int, axis: Axis) -> float:
    ring = _ring_us(hardware, nbytes, ranks, axis)
    if kind == "all_reduce":
        return min(2 * ring, _tree_us(hardware, nbytes, axis))
    if kind == "broadcast":
        return min(ring, _tree_us(hardware, nbytes, axis) / 2)
    return ring


def alike(kind: str) -> tuple[str, ...]:
    """Return the kinds whose curves price a kind: its own, and one with the same messages."""
    return (kind, "all_gather") if kind == "all_to_all" else (kind,)


@dataclass(frozen=True)
class Measured:
    """A curve over bytes that was measured among `world` ranks."""

    curve: Curve
    world: int

    def direct(self, ranks: int) -> float:
        """Return the factor for another world size if each rank sends to each other."""
        return (ranks - 1) / (self.world - 1)


def nearest_world(hardware: Hardware, prefix: str, ranks: int) -> Measured | None:
    """Return the curve `prefix` + world whose world is nearest to `ranks`, or None."""
    worlds = [int(n.removeprefix(prefix)) for n in hardware.curves if n.startswith(prefix)]
    if not worlds:
        return None
    world = min(worlds, key=lambda w: abs(math.log(w / ranks)))
    return Measured(hardware.curves[f"{prefix}{world}"], world)


def _measured_us(hardware: Hardware, kind: str, nbytes: int, ranks: int) -> float | None:
    names = [f"{each}.{how}." for each in alike(kind) for how in ("direct", "native")]
    for name in names:
        found = nearest_world(hardware, name, ranks)
        if found is not None:
            parts = (ranks - 1) / ranks * found.world / (found.world - 1)
            return parts * found.curve.time_at(max(nbytes, 1))
    return None


def _ring_us(hardware: Hardware, nbytes: int, ranks: int, axis: Axis) -> float:
    """Return the time of a ring all-gather: the slower of links and network, plus all hops."""
    passed = nbytes * (ranks - 1) / ranks
    share = LINK_SHARE[hardware.backend]
    within = passed / (hardware.node_link_bytes_per_s * share) if axis.within > 1 else 0.0
    between, hops = 0.0, (axis.within - 1) * axis.nodes * hardware.node_latency_us
    if axis.nodes > 1:
        ports = hardware.network_bytes_per_s * share / axis.beside
        between = nbytes * (axis.nodes - 1) / axis.nodes / ports
        hops += axis.nodes * hardware.network_latency_us
    return _US * max(within, between) + hops


def _tree_us(hardware: Hardware, nbytes: int, axis: Axis) -> float:
    """Return the time of an all-reduce up and down a binary tree of nodes."""
    rate, up = hardware.node_link_bytes_per_s, 0.0
    if axis.nodes > 1:
        rate = min(rate, hardware.network_bytes_per_s / axis.beside)
        up = math.ceil(math.log2(axis.nodes)) * hardware.network_latency_us
    up += (axis.within - 1) * hardware.node_latency_us
    return 2 * (_US * nbytes / (rate * LINK_SHARE[hardware.backend]) + up)
