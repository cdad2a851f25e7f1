"""Tiled parameters: parameters that are gathered tile by tile, and the layout of their tiles.

A tiled parameter is cut into `count` tiles with equal numbers of rows, and every tile has its own
bucket. A rank owns an equal range of each tile. These ranges are consecutive in one allocation, so
that a rank's share of the parameter is still one contiguous 1-D tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]  # half-open, of elements of a flat parameter


@dataclass(frozen=True)
class Tile:
    """The rows of a parameter that a bucket holds: tile `index` of `count` equal tiles.

    Shapes: `shape` is the shape of the whole parameter, and `name` is its name.
    """

    name: str
    shape: tuple[int, ...]
    index: int
    count: int

    @property
    def num_rows(self) -> int:
        return self.shape[0] // self.count

    @property
    def rows(self) -> Range:
        """The half-open range of rows."""
        return self.index * self.num_rows, (self.index + 1) * self.num_rows

    @property
    def part_name(self) -> str:
        """The name of the tile as a parameter of its own: `mlp.up.weight[1024:2048]`."""
        first, end = self.rows
        return f"{self.name}[{first}:{end}]"

    @property
    def unit(self) -> str:
        """The name of the unit that consists of this tile, which travels alone."""
        return f"{self.name} tile {self.index + 1}/{self.count}"


def tiles_of(name: str, shape: tuple[int, ...], count: int) -> list[Tile]:
    """Return the tiles of a parameter, in order."""
    return [Tile(name, shape, index, count) for index in range(count)]


def cut(full: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """Return the elements of these ranges of a flat tensor; a single range is a view."""
    if len(ranges) == 1:
        return full[ranges[0][0] : ranges[0][1]]
    return torch.cat([full[start:stop] for start, stop in ranges])


def spread(full: Tensor, ranges: tuple[Range, ...], values: Tensor) -> None:
    """Write a rank's 1-D elements into their ranges of a flat tensor."""
    sizes = [stop - start for start, stop in ranges]
    for (start, stop), part in zip(ranges, values.split(sizes), strict=True):
        full[start:stop].copy_(part)


def say(ranges: tuple[Range, ...]) -> str:
    """Format ranges for error messages: `0:64`, or `0:64, 128:192, ... (16 ranges)`."""
    shown = ", ".join(f"{start}:{stop}" for start, stop in ranges[:2])
    return shown if len(ranges) <= 2 else f"{shown}, ... ({len(ranges)} ranges)"
