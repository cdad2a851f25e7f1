"""Shards of one model on one rank: flat buffers, and the parameters that show pieces of them."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
from torch import Tensor, nn

from zerofx.comm.together import together
from zerofx.comm.world import World
from zerofx.compat.tensors import version_of
from zerofx.errors import NvmeError
from zerofx.layout.buckets import LOW_OR_SINGLE, Layout
from zerofx.layout.slices import local_of
from zerofx.layout.tiers import Tier
from zerofx.runtime.store.grads import StoreGrads
from zerofx.runtime.store.init import fill_shards
from zerofx.runtime.store.optimizer import leave_behind, watch_steps
from zerofx.runtime.store.tree import Bindings, ParameterTree, attributes_of
from zerofx.runtime.store.unmarked import Posted
from zerofx.runtime.store.updates import Updates
from zerofx.runtime.tensors.parameter import make_parameter, make_piece
from zerofx.runtime.tensors.piece import Ledger
from zerofx.runtime.tiers.homes import claim_space


class ShardStore:
    """A rank's part of a model: one flat shard per bucket, and its gradients.

    The shards of a tiled parameter's buckets are consecutive in one allocation.

    `params` maps canonical names to the tensors that the user sees: sharded wrappers, or plain
    tensors of the global shape if the shard axis has one rank. `replaced` maps id(old parameter) to
    the new one, for an optimizer that was built before.
    """

    def __init__(
        self, layout: Layout, world: World, in_backward: bool = False, folder: str | None = None
    ) -> None:
        self.layout, self.folder = layout, folder
        self.made = time.monotonic()
        self.world = world
        self.ledger = Ledger(layout, world, in_backward)
        self.pieces = {name: make_piece(self.ledger, name) for name in layout.owned}
        self.homes = self.ledger.homes
        if _is_far(layout):
            assert folder is not None, "a plan with the tier nvme has a path"
            self.homes.open(folder, world.rank, layout, keeps=not in_backward)
        with torch.inference_mode(False):
            self._flats = [
                self.homes.shard(block[0], layout.block_numel(block)) for block in layout.blocks
            ]
            self.shards = [
                layout.part(self._flats[layout.block_of[b.index]], b.index) for b in layout.buckets
            ]
        self.params: dict[str, nn.Parameter] = {}
        # All names of parameters that zerofx leaves to the user.
        self.ignored: frozenset[str] = frozenset()
        self.replaced: dict[int, nn.Parameter] = {}
        self.posted: Posted | None = None  # set by zerofx.compile
        self.grads = StoreGrads(self.ledger, self.params, self.pieces, self._flats)
        self._bindings: Bindings
        self._versions = 0

    @classmethod
    def build(
        cls,
        model: nn.Module,
        layout: Layout,
        world: World,
        seed: int | None = None,
        in_backward: bool = False,
        folder: str | None = None,
        given: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> ShardStore:
        """Move the model's values (rank 0's) into shards and swap its parameters in place.

        Parameters on meta are initialised module by module under one seed: `seed`, or rank 0's
        `torch.initial_seed()`. This is a collective call.

        in_backward: whether updates run inside backward.
        folder: for data on NVMe.
        given: names of parameters on meta whose values come later.
        ignored: names of parameters that are left as they are.

        Raises:
            ShardError: a parameter cannot be laid out or initialised; the model is unchanged unless
                the initialisation itself failed.
        """
        tree = ParameterTree(model, ignored)
        tree.check()
        _check_layout(tree, layout)
        store = cls._make(layout, world, in_backward, folder)
        store.ignored = frozenset(ignored)
        fill_shards(store, model, tree, seed, given)
        store._watch(tree)
        return store

    @classmethod
    def _make(
        cls, layout: Layout, world: World, in_backward: bool, folder: str | None
    ) -> ShardStore:
        """Return a store without values: on every rank, or on none if files cannot be created."""
        if not _is_far(layout):
            return cls(layout, world, in_backward, folder)
        assert folder is not None, "a plan with the tier nvme has a path"
        claim_space(world, folder, layout, keeps=not in_backward)
        made: list[ShardStore] = []

        def make() -> None:
            made.append(cls(layout, world, in_backward, folder))

        together(world, f"creation of the files in {folder}", make, NvmeError)
        return made[0]

    @classmethod
    def copy_of(cls, other: ShardStore, model: nn.Module) -> ShardStore:
        """Return a store with its own memory and `other`'s values, over a copy of its model."""
        tree = ParameterTree(model, other.ignored)
        store = cls(other.layout, other.world, other.updates is not None, other.folder)
        with torch.no_grad():
            for mine, theirs in zip(store.shards, other.shards, strict=True):
                mine.copy_(theirs)
                store.homes.rest()
                other.homes.rest()
        store.ignored, store.posted = other.ignored, other.posted
        store.ledger.layered = other.ledger.layered
        store.ledger.copied_from = other.ledger.copied_from | {other.ledger.number}
        for name, param in other.params.items():
            tree.place(name, store._parameter(name, param))
        store._watch(tree)
        return store

    @property
    def is_sharded(self) -> bool:
        return self.layout.is_cut

    @property
    def is_away(self) -> bool:
        """Whether any shard lives off the device."""
        return any(b.is_away for b in self.layout.buckets)

    @property
    def updates(self) -> Updates | None:
        """The updates inside backward; None if optimizers step after it."""
        return self.ledger.updates

    @property
    def epoch(self) -> int:
        """A number that increases with every write to parameters that was or may have been made."""
        return self.ledger.writes + self.ledger.handouts

    @property
    def writes(self) -> int:
        """A number that increases with every detected write to parameters, except delayed ones."""
        return self.ledger.seen_writes if self.ledger.is_delayed else self.ledger.writes

    def local_view(self, name: str) -> Tensor:
        """Return the elements of a parameter that the flat shard holds, 1-D."""
        piece = self.pieces[name]
        return piece.within(self._flats[self.layout.block_of[piece.bucket.index]])

    def adopt(self, tree: ParameterTree, name: str, original: nn.Parameter) -> None:
        """Create the parameter over the shard's values and put it wherever the old one is held.

        `original` is the user's parameter; `tree` may hold a materialised copy of it.
        """
        new = self._parameter(name, tree.params[name])
        self.replaced[id(original)] = new
        tree.place(name, new)
        leave_behind(original)

    def _parameter(self, name: str, like: nn.Parameter) -> nn.Parameter:
        """Create parameter `name` over the shard's values, with `like`'s flag and attributes."""
        with torch.inference_mode(False), torch.no_grad():
            new = make_parameter(self.local_view(name), self.pieces[name], like.requires_grad)
        vars(new).update(attributes_of(like))
        self.params[name] = new
        return new

    # -- changes that the user may have made -------------------------------------------------------
    def poll_writes(self) -> int:
        """Detect writes that torch counted in the flat shards' versions; return `writes`."""
        versions = sum(map(version_of, self.shards))
        if versions != self._versions:
            self._versions = versions
            self.ledger.note_write()
        return self.writes

    def settle(self) -> None:
        """Wait for updates that run next to the schedule: parameters are about to be read."""
        self.ledger.pending.join()

    def check_bindings(self) -> None:
        """Check that the module tree holds the compiled parameters, and that they are in shards.

        If another tensor was assigned in a parameter's place (`module.weight = nn.Parameter(...)`,
        `load_state_dict(assign=True)`), its values are copied into the shard and our parameter is
        put back.

        Raises:
            ShardError: a submodule was exchanged, or values do not fit; the message names it.
        """
        self._bindings.check()
        self.poll_writes()

    def _watch(self, tree: ParameterTree) -> None:
        watch_steps()
        with torch.inference_mode(False), torch.no_grad():
            views = {name: self.local_view(name) for name in self.params}
        self._bindings = Bindings(tree, self.ledger, self.params, self.pieces, views)
        self._versions = sum(map(version_of, self.shards))


def _is_far(layout: Layout) -> bool:
    """Return whether any shard lives on NVMe."""
    return any(b.home is Tier.NVME for b in layout.buckets)


def _check_layout(tree: ParameterTree, layout: Layout) -> None:
    """Check that the layout and the model have the same parameters."""
    missing = tree.params.keys() ^ layout.owned.keys()
    assert not missing, f"layout and model differ in {sorted(missing)}"
    for name, param in tree.params.items():
        bucket, piece = layout.owned[name][0]
        can_hold = param.dtype == bucket.dtype or {param.dtype, bucket.dtype} <= {*LOW_OR_SINGLE}
        is_slice = piece.owner_part is not None and piece.owner_part.is_given
        shape = tuple(local_of(param).shape) if is_slice else tuple(param.shape)
        fits = shape == (piece.shape if is_slice else piece.whole_shape) and can_hold
        assert fits, f"{name} is {param.dtype} {list(param.shape)}, the layout says {piece}"
