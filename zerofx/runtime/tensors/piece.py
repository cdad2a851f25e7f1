"""Pieces of parameters: the elements that a rank owns, and the ledger that their model shares.

A parameter and every tensor that is cut like it (gradients, optimizer states) carry their piece as
`zfx`. Callers use the piece instead of checking the parameter's class. It provides the parameter's
name, ledger and bucket, the part of a tensor that this rank holds, the tensor that the user sees of
flat memory, and the gather of the whole.

    piece = piece_of(param)               # None for a parameter of no compiled model
    piece.local(param.grad)               # the plain tensor that this rank holds
    piece.show(flat[start:stop])          # flat memory, cut or shaped like the parameter
    piece.whole(flat[start:stop])         # all of it, on every rank; a collective call
"""

from __future__ import annotations

import itertools
import math
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from zerofx.compat.tensors import shard_mesh, shard_spec
from zerofx.errors import NvmeError, ShardError
from zerofx.layout.buckets import Bucket, Layout, ParamSlice
from zerofx.layout.placements import Part, join
from zerofx.layout.slices import Layered
from zerofx.layout.tiles import Range, cut, say, spread
from zerofx.runtime.store.updates import Updates
from zerofx.runtime.tensors.checkpoint import Box, boxes_of, boxes_of_part
from zerofx.runtime.tiers.homes import Homes
from zerofx.runtime.tiers.host_updates import HostUpdates

if TYPE_CHECKING:
    from zerofx.comm.world import World

# id of an alias -> the alias, the owner of its memory, the parameter's name
_handed_out: dict[int, tuple[weakref.ref[Tensor], DataAliases, str]] = {}


class DataAliases:
    """Live tensors that `p.data` has returned for one model's parameters, by parameter.

    They keep their values when `p.data` is replaced, as in eager PyTorch. There, the assigned
    tensor becomes the parameter's memory, and the earlier `p.data` keeps the old memory. Loops that
    average weights rely on that (`backup = p.data; p.data = average; ...; p.data = backup`). Here a
    parameter stays in its flat shard, so the values are copied in, and earlier results of `p.data`
    move to memory of their own.

    tied: parameters that were assigned the `p.data` of another parameter that still has it; in
        eager PyTorch they would share memory from then on. Maps a name to (the other's owner, its
        name).
    """

    def __init__(self) -> None:
        self._ids: dict[str, set[int]] = {}
        self.tied: dict[str, tuple[DataAliases, str]] = {}
        self._borrowers: dict[str, list[tuple[DataAliases, str]]] = {}

    def hand_out(self, name: str, alias: Any) -> Any:
        """Return `alias` of a parameter's memory, and track it for as long as it lives."""
        number, ids = id(alias), self._ids.setdefault(name, set())

        def forget(_: Any) -> None:
            _handed_out.pop(number, None)
            ids.discard(number)

        _handed_out[number] = weakref.ref(alias, forget), self, name
        ids.add(number)
        return alias

    def take_back(self, name: str) -> Iterator[Any]:
        """Yield the live aliases of a parameter, and stop tracking them as its aliases."""
        for number in list(self._ids.get(name, ())):
            alias = _handed_out.pop(number)[0]()
            if alias is not None:
                yield alias
        self._ids.pop(name, None)

    def note_assignment(self, name: str, value: Any) -> None:
        """Record whether `p.data = value` ties two parameters; remove the ties that it undoes."""
        self.tied.pop(name, None)
        for borrower, other in self._borrowers.pop(name, ()):
            if borrower.tied.get(other) == (self, name):
                del borrower.tied[other]
        found = _handed_out.get(id(value))
        if found is not None and found[1:] != (self, name):
            _, owner, other = found
            self.tied[name] = owner, other
            owner._borrowers.setdefault(other, []).append((self, name))


_NUMBERS = itertools.count()
P = TypeVar("P", bound="ParameterPiece")


class Ledger:
    """The world and the write counts that a store shares with every tensor made from it.

    `seen_writes` counts the detected writes to parameters, `own_writes` those by zerofx's own
    optimizers. `handouts` counts plain aliases given to the user (`to_local()`), through which
    later writes cannot be detected. From the first alias on, it also counts every backward, because
    an optimizer may step through the alias. The ledger refers to no parameter, so that dropping a
    model frees its shards at once.

    number: increases from model to model, so that all ranks have any two of them in the same order.
    copied_from: the numbers of the models that this one is a deep copy of, or a copy of a copy.
    homes: allocates memory for data that belongs to a bucket, on the bucket's tier.
    steps_begun: the number of steps of optimizers that have begun, even if they did not end.
    pending: updates on the host that run next to the schedule.
    updates: the object that updates parameters inside backward, if the plan has updates there.
    half_made: the error that ended an update over NVMe on some rank, known to all ranks; reset by a
        load.
    aliases: live results of `p.data`.
    copies: this rank's slice of each resident bucket that is computed with in another dtype.
    hooks: by parameter name, the functions to call with it after each backward.
    layered: by parameter name, how those that were DTensors lay over their meshes.
    reader: while the model's forward runs eagerly, returns a parameter as a whole tensor, by name.
    when_dropped: by parameter name, the function to call when p.grad of a sharded parameter is set
        to None.
    """

    def __init__(self, layout: Layout, world: World, in_backward: bool = False) -> None:
        self.layout = layout
        self.world = world
        self.number = next(_NUMBERS)
        self.copied_from: frozenset[int] = frozenset()
        self.is_delayed = False  # set by the engine: updates run during the next step
        self.seen_writes = 0
        self.own_writes = 0
        self.handouts = 0
        self.steps_begun = 0
        self.homes = Homes(world.device, lambda: self.foreign_writes)
        self.pending = HostUpdates()
        self.updates = Updates() if in_backward else None
        self.aliases = DataAliases()
        self.copies: dict[int, CastCopy] = {}
        self.half_made: str | None = None
        self.hooks: dict[str, OrderedDict[int, Callable[[Any], None]]] = {}
        self.layered: Mapping[str, Layered] = {}
        self.reader: Callable[[str], Tensor | None] | None = None
        self.on_step: Callable[[], None] | None = None  # called after an optimizer's step
        self.when_dropped: dict[str, Callable[[], None]] = {}

    def check_whole(self, what: str) -> None:
        """Refuse to use parameters if a failed update has reached only some of them.

        Raises:
            NvmeError: on all ranks alike, so that they stay together.
        """
        if self.half_made is not None:
            raise NvmeError(
                f"{what}: the last update failed before it had reached all parameters "
                f"({self.half_made}). zerofx.load an earlier state before continuing."
            )

    def note_write(self) -> None:
        """Count a write that was not made by one of zerofx's optimizers."""
        self.seen_writes += 1

    def note_update(self) -> None:
        """Count a write made by one of zerofx's optimizers."""
        self.own_writes += 1

    @property
    def writes(self) -> int:
        """A number that increases with every detected write to parameters."""
        return self.seen_writes + self.own_writes

    @property
    def foreign_writes(self) -> int:
        """A number that increases with every write that others made or may have made."""
        return self.seen_writes + self.handouts

    def note_backward(self) -> None:
        """Assume that parameters change through an alias after this backward, if one exists."""
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

    It is current as long as it is known to hold the rounded shard. `mark` declares it current, and
    any write counted later makes it stale. Once an alias has been given to the user it is never
    current, since writes through the alias cannot all be detected.
    """

    def __init__(self, ledger: Ledger, full: Tensor, bucket: Bucket) -> None:
        self._ledger = ledger
        # Owned by the engine: a parameter that outlives it does not keep this alive.
        self._full = weakref.ref(full)
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
        """Declare that the slice now holds exactly the values of the shard."""
        self._writes = self._ledger.writes

    def part(self, start: int, stop: int) -> Tensor:
        """Return the slice's memory for elements start:stop of the shard."""
        full = self.full
        assert full is not None, "part of a resident copy was requested after its model was dropped"
        return full[self._start + start : self._start + stop]


@dataclass(frozen=True, eq=False)
class ParameterPiece(ABC):
    """The flat elements of one parameter that this rank owns: one range, or one range per tile.

    `own` contains half-open ranges of elements of the flattened parameter, in memory order. If the
    parameter is cut over the tensor axis, the ranges count within this rank's part of it.
    `shard_offset` counts elements of the rank's flat shard of `bucket` (of the first tile's, if
    there are tiles). Gradients and optimizer states of a parameter share its piece.

    is_cut: whether the tensors are sharded; otherwise this rank owns all elements, and they are
        plain.
    """

    ledger: Ledger
    bucket: Bucket
    param: ParamSlice
    shard_offset: int
    own: tuple[Range, ...]
    length: int
    shape: torch.Size
    _specs: dict[torch.dtype, Any] = field(default_factory=dict, repr=False)

    is_cut: ClassVar[bool]

    @classmethod
    def of(cls: type[P], ledger: Ledger, name: str) -> P:
        """Return the piece of parameter `name` that the ledger's rank owns."""
        layout, rank = ledger.layout, ledger.world.shard_rank
        bucket, param = layout.owned[name][0]
        offset, _, _ = layout.piece(bucket, param, rank)
        ranges = layout.ranges(name, rank)
        length = sum(stop - start for start, stop in ranges)
        return cls(ledger, bucket, param, offset, ranges, length, torch.Size(param.whole_shape))

    # -- methods that differ between the two kinds ----- -------------------------------------------
    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """Return the plain tensor with this rank's elements of a parameter, gradient or state."""

    @abstractmethod
    def show(self, flat: Tensor) -> Tensor:
        """Return this rank's elements as users see them: cut or shaped like the parameter."""

    @abstractmethod
    def publish(self, param: Tensor, gradient: Tensor) -> None:
        """Set `param.grad` to a gradient created by `show`."""

    # -- which elements -----------------------------------------------------------------------
    @cached_property
    def name(self) -> str:
        return self.param.owner

    @cached_property
    def index(self) -> int:
        """The number of parameters that precede this one in the bucket."""
        return self.bucket.params.index(self.param)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterPiece:
        """Return the piece itself: copies of a tensor belong to the same parameter."""
        return self

    def within(self, shard: Tensor) -> Tensor:
        """Return the parameter's range of the rank's flat shard of its bucket, or of its tiles."""
        return shard[self.shard_offset : self.shard_offset + self.length]

    @property
    def tensor_part(self) -> Part | None:
        """The parameter's cut over the tensor axis, if any; `own` refers to this rank's part."""
        return self.param.owner_part

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The elements of the flattened parameter that this rank owns, in the order it holds them.

        If the parameter is cut over a tensor axis, there may be as many ranges as a dimension has
        rows.
        """
        part = self.tensor_part
        return self.own if part is None else tuple(part.ranges(self._tensor_rank, self.own))

    @property
    def _tensor_rank(self) -> int:
        return self.ledger.world.axis("tensor").rank

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's elements of the flattened parameter `full`, 1-D."""
        return cut(self._part_of(full, self._tensor_rank), self.own)

    def _part_of(self, full: Tensor, tensor_rank: int) -> Tensor:
        """Return the part of the flattened parameter that a rank of the tensor axis has, 1-D."""
        part = self.tensor_part
        if part is None:
            return full
        return part.of(full.view(part.shape), tensor_rank).reshape(-1)

    def shares(self, full: Tensor) -> list[Tensor]:
        """Return the elements of the flattened parameter that each rank of one copy owns."""
        layout = self.ledger.layout
        parts = [self._part_of(full, tensor) for tensor in range(layout.tensor_size)]
        ranges = map(self.ranges_of, range(layout.shard_size))
        return [cut(part, mine) for mine in ranges for part in parts]

    def num_given(self, rank: int, owner: int) -> int:
        """Return how many elements a rank sends to the owner of the whole, without overlap.

        rank, owner: ranks among those that hold one copy of the model.
        """
        size = self.ledger.layout.tensor_size
        if self.tensor_part is None and rank % size != owner % size:
            return 0
        return sum(stop - start for start, stop in self.ranges_of(rank // size))

    def put_together(self, given: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter, which this rank owns, from the elements of each rank."""
        size, part = self.ledger.layout.tensor_size, self.tensor_part
        whole = given[0].new_empty(self.shape)
        if part is None:
            self._spread(whole.view(-1), given[self._tensor_rank :: size])
            return whole
        flat = given[0].new_empty(math.prod(part.local))
        for tensor in range(size):
            self._spread(flat, given[tensor::size])
            mine = part.within(whole, tensor)
            mine.copy_(flat.view(mine.shape))
        return whole

    def _spread(self, flat: Tensor, given: Sequence[Tensor]) -> None:
        """Write the elements of each rank of the shard axis into their ranges of a flat tensor."""
        for shard, values in enumerate(given):
            spread(flat, self.ranges_of(shard), values)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The same elements as boxes of the parameter's own shape."""
        if self.tensor_part is not None:
            return boxes_of_part(self.tensor_part, self._tensor_rank, self.own)
        return boxes_of(self.shape, self.own)

    def says(self) -> str:
        """Name the elements that this rank owns, for errors."""
        return say(self.own)

    def spec(self, dtype: torch.dtype) -> Any:
        """Return the DTensorSpec of a tensor of this shape (made once per dtype)."""
        spec = self._specs.get(dtype)
        if spec is None:
            spec = self._specs[dtype] = shard_spec(self.ledger.mesh, self.shape, dtype)
        return spec

    def ranges_of(self, shard_rank: int) -> tuple[Range, ...]:
        """Return the half-open flat ranges of the parameter that `shard_rank` owns."""
        return self.ledger.layout.ranges(self.name, shard_rank)

    def same_cut(self, other: ParameterPiece) -> bool:
        """Whether element i of one local tensor is the same global element as i of the other.

        True between the layouts of a model and of its copy, if both are cut alike.
        """
        return self is other or (
            self.shape == other.shape
            and self.own == other.own
            and self.tensor_part == other.tensor_part
            and self.ledger.layout.shard_size == other.ledger.layout.shard_size
            and all(
                self.ranges_of(r) == other.ranges_of(r)
                for r in range(self.ledger.layout.shard_size)
            )
        )

    # -- collective calls ---------------------------------------------------------------------
    @torch.no_grad()
    def whole(self, local: Tensor, what: str = "full_tensor") -> Tensor:
        """Return the plain full tensor of which `local` is this rank's piece; a collective call.

        Pieces are padded to the longest one, since an all-gather takes equal shares. If one rank
        owns everything, the others still send that much, which is acceptable since these parameters
        are small. Pieces are sent between devices even if they live on the host. The result is on
        the same tier as the pieces.
        """
        ledger = self.ledger
        world, layout = ledger.world, ledger.layout
        part, stages = self.tensor_part, world.axis("pipeline")
        if layout.shard_size == stages.size == 1 and part is None:
            return local.clone().view(self.shape)
        world.agree(f"{what} of {self.name}", "")
        full = local.new_empty(self.shape)
        if layout.has(self.bucket):
            full = self._of_stage(local)
        if stages.size > 1:
            box = full.to(world.device)
            first = self.bucket.positions[0]
            stages.broadcast(box.view(-1), first, f"{what} of {self.name}").wait()
            full = box.to(local.device)
        return full

    def _of_stage(self, local: Tensor) -> Tensor:
        """Return the whole parameter on the ranks of a pipeline stage that holds it."""
        part, size = self.tensor_part, self.ledger.layout.shard_size
        if part is not None:
            mine = local.clone() if size == 1 else self._of_shards(local, math.prod(part.local))
            return join_parts(self.ledger.world, mine.view(part.local), part)
        if size == 1:
            return local.clone().view(self.shape)
        return self._of_shards(local, self.shape.numel()).view(self.shape)

    def _of_shards(self, local: Tensor, numel: int) -> Tensor:
        """Return all elements that the ranks of the shard axis have together, 1-D."""
        ledger = self.ledger
        world, size = ledger.world, ledger.layout.shard_size
        ranges = [self.ranges_of(r) for r in range(size)]
        lengths = [sum(stop - start for start, stop in mine) for mine in ranges]
        longest = max(lengths)
        share = local.new_zeros(longest, device=world.device)
        share[: self.length].copy_(local)
        parts = share.new_empty(size * longest)
        world.all_gather(parts, share).wait()
        full = local.new_empty(numel)
        for rank, (mine, length) in enumerate(zip(ranges, lengths, strict=True)):
            spread(full, mine, parts[rank * longest :][:length])
        return full

    @torch.no_grad()
    def whole_of_rows(self, rows: Tensor) -> Tensor:
        """Return the plain full tensor of which `rows` are this rank's; a collective call.

        The rows are those that torch's `Shard(0)` gives each rank of the shard axis. All ranks but
        the last ones have ceil(shape[0] / size) rows, so that the padded shares in rank order are
        the tensor.

        Raises:
            ShardError: the rows are not those of a tensor of the parameter's shape; raised on all
                ranks.
        """
        ledger = self.ledger
        world, size = ledger.world, ledger.layout.shard_size
        count, *inner = self.shape
        longest = -(-count // size)
        start = min(world.shard_rank * longest, count)
        expected = [min(longest, count - start), *inner]
        what = f"loading of rows of {self.name} of a full state dict"
        if not world.all_well(what, list(rows.shape) == expected):
            raise ShardError(
                f"{self.name} has global shape {list(self.shape)}, but the full state dict has "
                f"another: this rank was given rows of shape {list(rows.shape)} and expected "
                f"{expected}. Load a state dict of the same model."
            )
        share = rows.new_zeros((longest, *inner), device=world.device)
        share[: rows.shape[0]].copy_(rows)
        parts = share.new_empty((size * longest, *inner))
        world.all_gather(parts.view(-1), share.view(-1)).wait()
        return parts[:count]

    def gather_partials(self, partials: Tensor, what: str) -> Tensor:
        """Return every shard rank's `partials` [n] as one tensor [shard_size, n], in rank order.

        The result is on the device of `partials`: the host, for a parameter that lives there.
        Partials over the tensor axis are combined by `over_parts` instead.
        """
        world, size = self.ledger.world, self.ledger.layout.shard_size
        world.agree(what, f"{self.name}, {partials.numel()} values")
        mine = partials.contiguous().to(world.device)
        out = mine.new_empty(size * mine.numel())
        world.all_gather(out, mine).wait()
        return out.view(size, -1).to(partials.device)


@torch.no_grad()
def over_parts(
    pieces: Sequence[ParameterPiece], values: Tensor, combine: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `values` [n], one per piece, combined over the tensor axis.

    Values of parameters that are not cut over the tensor axis are equal on its ranks and stay
    unchanged. For each parameter, the value of its own pipeline stage is used. This is a collective
    call if the model has such an axis.
    """
    world = pieces[0].ledger.world
    are_cut = [p.tensor_part is not None for p in pieces]
    combined = over_tensor_axis(world, values, are_cut, combine)
    return combined if world.axis("pipeline").size == 1 else _of_owners(pieces, combined)


def _of_owners(pieces: Sequence[ParameterPiece], values: Tensor) -> Tensor:
    """Return for each parameter the value of the first pipeline stage that holds it."""
    world = pieces[0].ledger.world
    axis = world.axis("pipeline")
    mine = values.contiguous().to(world.device)
    found = mine.new_empty(axis.size * mine.numel())
    axis.all_gather(found, mine.view(-1), "values of other stages' parameters").wait()
    owners = torch.tensor([p.bucket.positions[0] for p in pieces], device=mine.device)
    return found.view(axis.size, -1).gather(0, owners[None])[0].to(values.device)


@torch.no_grad()
def over_tensor_axis(
    world: World, values: Tensor, are_cut: Sequence[bool], combine: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `values` [n], with those that `are_cut` combined over the tensor axis."""
    axis = world.axis("tensor")
    if axis.size == 1:
        return values
    mine = values.contiguous().to(world.device)
    found = mine.new_empty(axis.size * mine.numel())
    axis.all_gather(found.view(-1), mine.view(-1), "partial values of parameters' parts").wait()
    combined = combine(found.view(axis.size, -1))
    return torch.where(torch.tensor(are_cut, device=mine.device), combined, mine).to(values.device)


@torch.no_grad()
def join_parts(world: World, mine: Tensor, part: Part) -> Tensor:
    """Return the whole parameter of which `mine` is this rank's part; a collective call."""
    axis = world.axis("tensor")
    share = mine.contiguous().to(world.device)
    found = share.new_empty(axis.size * share.numel())
    axis.all_gather(found, share.view(-1), "a parameter's parts").wait()
    parts = [each.view(part.local) for each in found.view(axis.size, -1)]
    return join(parts, part.cut).to(mine.device)


class WholePiece(ParameterPiece):
    """The piece of a parameter that this rank holds whole, as plain tensors."""

    is_cut = False

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def show(self, flat: Tensor) -> Tensor:
        return flat.view(self.shape)

    def publish(self, param: Tensor, gradient: Tensor) -> None:
        param.grad = gradient


def piece_of(tensor: Any) -> ParameterPiece | None:
    """Return the piece of a compiled model's parameter, or of a tensor that is cut like one.

    Returns None for all other tensors: parameters of no compiled model, and plain gradients and
    states.
    """
    return getattr(tensor, "zfx", None)


def is_cut(tensor: Any) -> bool:
    """Return whether a tensor is sharded, so that this rank holds only a part of it."""
    piece = piece_of(tensor)
    return piece is not None and piece.is_cut
