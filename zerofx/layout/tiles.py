"""Tiled parameters: parameters that are gathered tile by tile, and the layout of their tiles.

A tiled parameter is cut into `count` tiles with equal numbers of rows, and every tile has its own
bucket. A rank owns an equal range of each tile. These ranges are consecutive in one allocation, so
that a rank's share of the parameter is still one contiguous 1-D tensor.

If the parameter is cut over the tensor axis, a rank's part of it is what is tiled: a tile has
consecutive rows of the part of each rank. If the axis cuts rows, these are not consecutive in the
whole parameter, whose rows are then viewed as [groups, ranks, tiles of a group, rows of a tile].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerofx.layout.placements import Cut, Part

Range = tuple[int, int]  # half-open, of elements of a flat parameter


@dataclass(frozen=True)
class Tile:
    """The rows of a parameter that a bucket holds: tile `index` of `count` equal tiles.

    part: the cut of the whole parameter over the tensor axis, if any.
    Shapes: `shape` is the shape of the whole parameter, and `name` is its name.
    """

    name: str
    shape: tuple[int, ...]
    index: int
    count: int
    part: Part | None = None

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the tile on one rank."""
        held = self.shape if self.part is None else self.part.local
        return (held[0] // self.count, *held[1:])

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the tile on all ranks of the tensor axis together."""
        return (self.shape[0] // self.count, *self.shape[1:])

    @property
    def rows(self) -> Range:
        """The half-open range of rows, of those that a rank has."""
        num_rows = self.local[0]
        return self.index * num_rows, (self.index + 1) * num_rows

    @property
    def split(self) -> TileSplit:
        """How rows of the whole parameter belong to tiles."""
        if self.part is None or self.part.cut.dim != 0:
            return TileSplit(1, 1, self.count)
        groups = self.part.cut.groups
        return TileSplit(groups, self.part.ranks, self.count // groups)

    @property
    def own_part(self) -> Part | None:
        """The cut of the tile over the tensor axis; its rows are of one group."""
        if self.part is None:
            return None
        cut = Cut(0) if self.part.cut.dim == 0 else self.part.cut
        return Part(self.whole, cut, self.part.ranks)

    def within(self, whole: Tensor) -> Tensor:
        """Return the tile's rows of a whole parameter, as a view [ranks, rows of a tile, ...]."""
        split = self.split
        group, tile = divmod(self.index, split.tiles)
        return whole.unflatten(0, (split.groups, split.ranks, split.tiles, -1))[group, :, tile]

    @property
    def part_name(self) -> str:
        """The name of the tile as a parameter of its own: `mlp.up.weight[1024:2048]`."""
        first, end = self.rows
        return f"{self.name}[{first}:{end}]"

    @property
    def unit(self) -> str:
        """The name of the unit that consists of this tile, which travels alone."""
        return f"{self.name} tile {self.index + 1}/{self.count}"


@dataclass(frozen=True)
class TileSplit:
    """A dimension whose indices belong to tiles: [groups, ranks, tiles of a group, rest]."""

    groups: int
    ranks: int
    tiles: int

    @property
    def is_plain(self) -> bool:
        """Whether the tiles are consecutive ranges."""
        return self.ranks == 1 or self.tiles == 1


def tiles_of(name: str, shape: tuple[int, ...], count: int, part: Part | None = None) -> list[Tile]:
    """Return the tiles of a parameter, in order."""
    return [Tile(name, shape, index, count, part) for index in range(count)]


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
