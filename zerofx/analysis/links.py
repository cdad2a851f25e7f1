"""What collectives take: by measured curves where there are any, else by latency and bandwidth.

On equal slices a ring all-gather or reduce-scatter of n bytes passes n * (w - 1) / w through each
rank, and n * (nodes - 1) / nodes through each node's ports; an all-reduce is one of each. A tree
takes all-reduces of little data, whose latency grows with the logarithm only. What lies within
nodes goes at the speed of their links, at the same time as what goes between nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerofx.hardware import Curve, Hardware

_US = 1e6
NCCL_SHARE = 0.85  # of a link's rate, that large messages reach


@dataclass(frozen=True)
class Axis:
    """How the ranks of a collective lie over nodes.

    within: ranks of the axis on one node. nodes: over how many they lie. beside: axes like it
        that use one node's ports at the same time.
    """

    within: int
    nodes: int
    beside: int

    @classmethod
    def of(cls, hardware: Hardware, ranks: int, stride: int) -> Axis:
        """Lay `ranks` ranks, each `stride` from the next, over nodes that are filled in order."""
        per_node = hardware.devices_per_node
        within = min(ranks, max(per_node // stride, 1))
        return cls(within, math.ceil(ranks / within), min(stride, per_node))


def collective_us(hardware: Hardware, kind: str, nbytes: int, ranks: int, stride: int) -> float:
    """Return the time of a collective over `ranks` ranks, from launch to delivery."""
    if ranks == 1:
        return 0.0
    measured = _measured_us(hardware, kind, nbytes, ranks)
    if measured is not None:
        return measured
    axis = Axis.of(hardware, ranks, stride)
    ring = _ring_us(hardware, nbytes, ranks, axis)
    if kind == "all_reduce":
        return min(2 * ring, _tree_us(hardware, nbytes, axis))
    if kind == "broadcast":
        return min(ring, _tree_us(hardware, nbytes, axis) / 2)
    return ring


@dataclass(frozen=True)
class Measured:
    """A curve over bytes that was measured among `world` ranks."""

    curve: Curve
    world: int

    def direct(self, ranks: int) -> float:
        """Return by what to multiply it for another world, where each sends to each other."""
        return (ranks - 1) / (self.world - 1)


def nearest_world(hardware: Hardware, prefix: str, ranks: int) -> Measured | None:
    """Return the curve `prefix` + world whose world is nearest to `ranks`, None without any."""
    worlds = [int(n.removeprefix(prefix)) for n in hardware.curves if n.startswith(prefix)]
    if not worlds:
        return None
    world = min(worlds, key=lambda w: abs(math.log(w / ranks)))
    return Measured(hardware.curves[f"{prefix}{world}"], world)


def _measured_us(hardware: Hardware, kind: str, nbytes: int, ranks: int) -> float | None:
    for algorithm in ("direct", "native"):
        found = nearest_world(hardware, f"{kind}.{algorithm}.", ranks)
        if found is not None:
            parts = (ranks - 1) / ranks * found.world / (found.world - 1)
            return parts * found.curve.time_at(max(nbytes, 1))
    return None


def _ring_us(hardware: Hardware, nbytes: int, ranks: int, axis: Axis) -> float:
    """Return the time of a ring all-gather: the slower of links and network, and all hops."""
    passed = nbytes * (ranks - 1) / ranks
    within = passed / (hardware.node_link_bytes_per_s * NCCL_SHARE) if axis.within > 1 else 0.0
    between, hops = 0.0, (axis.within - 1) * axis.nodes * hardware.node_latency_us
    if axis.nodes > 1:
        ports = hardware.network_bytes_per_s * NCCL_SHARE / axis.beside
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
    return 2 * (_US * nbytes / (rate * NCCL_SHARE) + up)
