"""Curves: measurements at some sizes, with interpolation between them."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zerofx.errors import PlanError
from zerofx.plan.fields import nearest, refuse

V = TypeVar("V")

# The first part of a curve's name -> the meaning of x, of the value, and of the other parts.
KINDS = {
    "matmul": "operations of one matrix product -> share of dense_flops_per_s; .FORMAT",
    "convolution": "samples x pixels of the result, with as many channels in as out -> share of "
    "dense_flops_per_s; .FORMAT.PASS.WINDOW.CHANNELS",
    "attention": "operations of the forward of one sample with 4 heads -> share of "
    "dense_flops_per_s; .FORMAT",
    "memory": "bytes an op reads and writes -> share of memory_bytes_per_s; .KIND.KERNELS",
    "heavy": "elements of which one op takes an exponential -> elements per us; .KERNELS, with "
    ".FUNCTION for tanh, erf, log, pow or sin",
    "pool": "elements in all windows of one pooling -> elements per us; .KERNELS",
    "crowd": "ranks of a node that compute at once -> time of regions relative to one alone",
    "pace": "ranks of a node that compute at once -> us of the step that crowd compares: how fast "
    "the machine was when it was measured",
    "call": "regions with almost no work (parameters of a step) -> us per call; .GRAPH.WORLD",
    "all_gather": "bytes of a full bucket -> us from launch to delivery; .ALGORITHM.WORLD",
    "reduce_scatter": "the same, without the sum; .ALGORITHM.WORLD",
    "all_reduce": "the same, without the sum; .ALGORITHM.WORLD",
    "broadcast": "the same; .ALGORITHM.WORLD",
    "all_to_all": "bytes that a rank sends, its own part included -> us; .ALGORITHM.WORLD",
    "beside": "bytes of a full bucket -> us that overlapping compute loses; .COLLECTIVE.WORLD",
    "between": "the same -> us that a collective adds between two pieces of compute, without the "
    "sum; .COLLECTIVE.WORLD",
    "arrival": "bytes of a reduced slice -> us of its sum over ranks; .WORLD",
    "host_copy": "bytes of one copy -> share of host_link_bytes_per_s",
    "nvme_read": "bytes of one request -> share of nvme_read_bytes_per_s",
    "nvme_write": "bytes of one request -> share of nvme_write_bytes_per_s",
    "host_update": "elements of one flat slice -> share of host_update_elements_per_s",
}
# Kinds whose whole name is parsed: format, pass, window, channels, ranks at once.
_SPELLED = {
    "convolution": re.compile(r"\w+\.(forward|input|weight)\.(1x1|3x3)\.[1-9]\d*(\.[1-9]\d*)?")
}


class Table(Mapping[str, V]):
    """An immutable mapping with a hash, so that a description of hardware can be a key."""

    __slots__ = ("_pairs", "_values")

    def __init__(self, values: Mapping[str, V]) -> None:
        self._pairs = tuple(sorted(values.items()))
        self._values = dict(self._pairs)

    def __getitem__(self, name: str) -> V:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True)
class Curve:
    """Points (x, value) with growing x; between them log(value) is linear in log(x)."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        """Return the value at `x`, constant beyond the ends; for shares."""
        first, last = self.points[0], self.points[-1]
        if x <= first[0]:
            return first[1]
        if x >= last[0]:
            return last[1]
        right = bisect.bisect_right(self.points, x, key=lambda point: point[0])
        (x0, v0), (x1, v1) = self.points[right - 1], self.points[right]
        part = math.log(x / x0) / math.log(x1 / x0)
        return v0 * (v1 / v0) ** part

    def time_at(self, x: float) -> float:
        """Return the value at `x`, in proportion to `x` beyond the last point; for times."""
        last_x, last_us = self.points[-1]
        return last_us * x / last_x if x > last_x else self.at(x)


def read_curves(where: str, value: Any) -> Table[Curve]:
    """Parse `{name: [[x, value], ...]}` with known kinds, growing x, and numbers above 0."""
    if not isinstance(value, Mapping):
        raise refuse(where, value, "is a mapping from names of curves to lists of points")
    for name in value:
        kind, _, details = str(name).partition(".")
        if kind not in KINDS:
            raise PlanError(f"{where}: unknown curve {name!r}{nearest(str(name), KINDS)}")
        if kind in _SPELLED and not _SPELLED[kind].fullmatch(details):
            raise PlanError(
                f"{where}: curve {name!r} is not named {kind}{KINDS[kind].rpartition(';')[2][1:]}, "
                "as in convolution.fp32.forward.3x3.64. Measure it: zerofx doctor --calibrate."
            )
    return Table({str(name): _curve(f"{where}[{name!r}]", v) for name, v in value.items()})


def _curve(where: str, value: Any) -> Curve:
    if isinstance(value, Curve):
        value = value.points
    allowed = "is a list of points [x, value], both above 0, with growing x"
    if not isinstance(value, Sequence) or not value or isinstance(value, str):
        raise refuse(where, value, allowed)
    points = tuple(_point(where, point, allowed) for point in value)
    for before, after in itertools.pairwise(points):
        if after[0] <= before[0]:
            raise refuse(where, list(after), allowed, f"It follows x = {before[0]:g}")
    return Curve(points)


def _point(where: str, point: Any, allowed: str) -> tuple[float, float]:
    is_pair = isinstance(point, Sequence) and not isinstance(point, str) and len(point) == 2
    if not is_pair or not all(type(v) in (int, float) and v > 0 for v in point):
        raise refuse(where, point, allowed)
    return float(point[0]), float(point[1])
