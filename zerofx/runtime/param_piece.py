"""What a sharded tensor knows: its parameter, this rank's piece of it, the count of writes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.compat.tensors import shard_mesh, shard_spec
from zerofx.errors import NvmeError
from zerofx.runtime.homes import Homes
from zerofx.runtime.host_updates import HostUpdates
from zerofx.runtime.layout import Bucket, Layout, ParamSlice
from zerofx.runtime.param_aliases import Aliases
from zerofx.runtime.param_boxes import Box, boxes_of
from zerofx.runtime.tiles import Range, cut, say
from zerofx.runtime.updates import Updates

if TYPE_CHECKING:
    from zerofx.runtime.world import World


_NUMBERS = itertools.count()


class Ledger:
    """The world and the write counts that a store shares with every tensor made from it.

    `seen_writes` counts the writes to parameters that were seen, `own_writes` those that our
    optimizers made. `handouts` counts plain aliases given
    away (`to_local()`), through which later writes cannot be seen, and every backward after the
    first of them: an optimizer may step through the alias. It refers to no parameter, so dropping
    a model frees its shards at once.

    number: grows from model to model, so that all ranks have two of them in one order.
    homes: hands out memory for what lives with a bucket, on the bucket's tier.
    pending: updates on the host that run beside the schedule.
    updates: where backward updates the parameters itself, who does it there.
    half_made: what ended an update over NVMe on some rank, as all of them know; a load repairs it.
    aliases: of parameters, as `p.data` handed them out.
    copies: of each resident bucket that is computed with in another format, this rank's slice.
    """

    def __init__(self, layout: Layout, world: World, in_backward: bool = False) -> None:
        self.layout = layout
        self.world = world
        self.number = next(_NUMBERS)
        self.is_delayed = False  # set by the engine: updates run beside the next step
        self.seen_writes = 0
        self.own_writes = 0
        self.handouts = 0
        self.homes = Homes(world.device, lambda: self.foreign_writes)
        self.pending = HostUpdates()
        self.updates = Updates() if in_backward else None
        self.aliases = Aliases()
        self.copies: dict[int, CastCopy] = {}
        self.half_made: str | None = None
        self.on_step: Callable[[], None] | None = None  # what an optimizer's step is told to

    def check_whole(self, what: str) -> None:
        """Refuse to use parameters some of which an update that failed has not reached.

        Raises:
            NvmeError: on all ranks alike, so that they stay together.
        """
        if self.half_made is not None:
            raise NvmeError(
                f"{what}: the last update failed before it had reached all parameters "
                f"({self.half_made}); zerofx.load an earlier state before going on"
            )

    def note_write(self) -> None:
        """Count a write that somebody else than an optimizer of ours has made."""
        self.seen_writes += 1

    def note_update(self) -> None:
        """Count a write that an optimizer of ours has made."""
        self.own_writes += 1

    @property
    def writes(self) -> int:
        """A number that grows with every write to parameters that was seen."""
        return self.seen_writes + self.own_writes

    @property
    def foreign_writes(self) -> int:
        """A number that grows with every write that was or may have been made by others."""
        return self.seen_writes + self.handouts

    def note_backward(self) -> None:
        """Take it that after this backward parameters change through an alias, if one is out."""
        if self.handouts:
            self.handouts += 1

    @cached_property
    def mesh(self) -> Any:
        """The shard axis as a DeviceMesh, for DTensor's bookkeeping only."""
        if self.world.shard_mesh is not None:
            return self.world.shard_mesh
        return shard_mesh(self.world.device.type, self.layout.shard_size, self.world.shard_rank)


class CastCopy:
    """This rank's slice of a bucket's resident copy: its shard's elements in the compute dtype.

    Current as long as it is known to hold the shard, rounded: `mark` says that it does now, and any
    write that is counted later makes it stale. Once an alias has been handed out none is current,
    since writes through it are not all seen.
    """

    def __init__(self, ledger: Ledger, full: Tensor, bucket: Bucket) -> None:
        self._ledger = ledger
        self._full = weakref.ref(full)  # the engine's: a parameter that outlives it frees this
        self._start, _ = ledger.layout.shard_bounds(bucket, ledger.world.shard_rank)
        self._writes = -1

    @property
    def full(self) -> Tensor | None:
        """The whole resident copy; None once the model is gone."""
        return self._full()

    @property
    def is_current(self) -> bool:
        ledger = self._ledger
        is_marked = self._writes == ledger.writes and not ledger.handouts
        return is_marked and self.full is not None

    def mark(self) -> None:
        """Note that the slice now holds exactly what the shard holds."""
        self._writes = self._ledger.writes

    def part(self, start: int, stop: int) -> Tensor:
        """Return the place of elements start:stop of the shard."""
        full = self.full
        assert full is not None, "a part of a resident copy was asked for whose model is gone"
        return full[self._start + start : self._start + stop]


@dataclass(frozen=True, eq=False)
class Piece:
    """The flat elements of one parameter that this rank owns: a range, or one of each tile.

    `ranges` are half-open and count elements of the flattened parameter, in the order in which they
    lie in memory, one behind another; `shard_offset` counts elements of the rank's flat shard of
    `bucket`, the first tile's where there are tiles. Gradients and optimizer states of a parameter
    share its piece.
    """

    ledger: Ledger
    bucket: Bucket
    param: ParamSlice
    shard_offset: int
    ranges: tuple[Range, ...]
    length: int
    shape: torch.Size
    _specs: dict[torch.dtype, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, ledger: Ledger, name: str) -> Piece:
        """Return the piece of parameter `name` that the ledger's rank owns."""
        layout, rank = ledger.layout, ledger.world.shard_rank
        bucket, param = layout.owned[name][0]
        offset, _, _ = layout.piece(bucket, param, rank)
        ranges = layout.ranges(name, rank)
        length = sum(stop - start for start, stop in ranges)
        return cls(ledger, bucket, param, offset, ranges, length, torch.Size(param.whole_shape))

    @property
    def name(self) -> str:
        return self.param.owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        """Return the piece itself: copies of a tensor belong to the same parameter."""
        return self

    def cut(self, full: Tensor) -> Tensor:
        """Return what this rank owns of the flattened parameter `full`, 1-D."""
        return cut(full, self.ranges)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The same elements as boxes of the parameter's own shape, in memory order."""
        return boxes_of(self.shape, self.ranges)

    def says(self) -> str:
        """Name the elements that this rank owns, for errors."""
        return say(self.ranges)

    def spec(self, dtype: torch.dtype) -> Any:
        """Return the DTensorSpec of a tensor of this shape (made once a dtype)."""
        spec = self._specs.get(dtype)
        if spec is None:
            spec = self._specs[dtype] = shard_spec(self.ledger.mesh, self.shape, dtype)
        return spec

    def ranges_of(self, shard_rank: int) -> tuple[Range, ...]:
        """Return the half-open flat ranges of the parameter that `shard_rank` owns."""
        return self.ledger.layout.ranges(self.name, shard_rank)

    def same_cut(self, other: Piece) -> bool:
        """Whether element i of one local tensor is the same global element as i of the other.

        True between the layouts of a model and of its copy, where both are cut alike.
        """
        return self is other or (
            self.shape == other.shape
            and self.ranges == other.ranges
            and self.ledger.layout.shard_size == other.ledger.layout.shard_size
            and all(
                self.ranges_of(r) == other.ranges_of(r)
                for r in range(self.ledger.layout.shard_size)
            )
        )
