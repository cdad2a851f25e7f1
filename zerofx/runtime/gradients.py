"""Gradients: packed into a bucket, reduced, and stored where the user sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.comm.collectives import Work, receive_buffers
from zerofx.comm.world import OverShards
from zerofx.compat.autograd import at_end_of_backward, backward_number
from zerofx.compat.tensors import foreach_copy_, foreach_zero_
from zerofx.policy import reduction
from zerofx.policy.borrowing import Loan
from zerofx.policy.reduction import End
from zerofx.runtime.loss_scale import LossScaler
from zerofx.runtime.schedule import Flight, label
from zerofx.runtime.slots import SlotPool
from zerofx.runtime.store.unsynced import LocalSums
from zerofx.runtime.sums import add_, add_unscaled_
from zerofx.runtime.tensors.tensor import local_of
from zerofx.runtime.views import BucketViews
from zerofx.runtime.wire.rows import launch_rows

if TYPE_CHECKING:
    from zerofx.runtime.store.shards import ShardStore
    from zerofx.runtime.tiers.away_shards import AwayShards
    from zerofx.runtime.tiers.bucket_updates import BucketUpdates
    from zerofx.runtime.tiers.host_tier import Copy


@dataclass(frozen=True)
class Asked:
    """The parameters, by name, that one backward computes gradients for; None means all of them.

    given: the parameters that this rank has a gradient for; it contributes zeros for the others.
    received: the parameters that get a gradient on every rank: requested, and given by some rank.
    """

    given: frozenset[str] | None = None
    received: frozenset[str] | None = None


EVERYTHING = Asked()


class Anchor:
    """Stand-in for a model's parameters in autograd's graph, which shows who needs their gradients.

    Gradients bypass autograd and go straight to p.grad, unless autograd.grad asks for them. It then
    returns the sum over all calls that one loss uses. Programs of one model share an anchor, so
    that the cost of a forward does not depend on the number of parameters, and gradients of several
    programs are summed here. In a backward, autograd visits each parameter, as it does for an eager
    model.

    output: the input of every call that depends on parameters.
    through, always: the nodes that run if parameters may be requested, and in every plain backward.
    nodes: parameter name -> the node of its gradient.
    returned: the gradients that the running autograd.grad requests, in the order of `nodes`.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.returned: list[Tensor | None] = []
        with torch.inference_mode(False), torch.enable_grad():  # in any mode of the first call
            leaf = torch.zeros((), requires_grad=True)
            self.output: Tensor = _Parameters.apply(self.returned, leaf, *params.values())
        self.through: Any = self.output.grad_fn
        (self.always, _), *edges = self.through.next_functions
        self.nodes: dict[str, Any] = dict(zip(params, (node for node, _ in edges), strict=True))

    @torch.no_grad()
    def add(self, found: Sequence[Tensor | None]) -> None:
        """Add the gradients of one backward to those that autograd.grad will return."""
        if not self.returned:
            self.returned[:] = found
            return
        for old, new in zip(self.returned, found, strict=True):
            if old is not None and new is not None:
                local_of(old).add_(local_of(new))
        pairs = zip(self.returned, found, strict=True)
        self.returned[:] = [new if old is None else old for old, new in pairs]


class _Parameters(torch.autograd.Function):
    """Depends on the parameters; its backward returns the gradients collected for them."""

    @staticmethod
    def forward(ctx: Any, returned: list[Tensor | None], *leaves: Tensor) -> Tensor:
        ctx.returned, ctx.num_params = returned, len(leaves) - 1  # the first is no parameter
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        grads = ctx.returned[:] or [None] * ctx.num_params
        ctx.returned.clear()
        return None, None, *grads


class Gradients:
    """Takes each bucket's gradients from packing to `p.grad`.

    no_sync: sum on this rank only. discards: this backward runs for inputs alone, so that no
    parameter gets a gradient. leaves_sums: other backwards reduce what no_sync has summed, and this
    one gives nothing for. is_part: the end of the pipeline's call that it belongs to looks for
    overflows. asked: which get one otherwise; the p.grad of others stays as it is. lends: memory is
    used again by later reductions. has_added: a backward has found gradients of an earlier one.
    steps_before: the steps of optimizers that had begun when the last backward ended.
    """

    def __init__(
        self,
        store: ShardStore,
        slots: SlotPool,
        views: BucketViews,
        scaler: LossScaler | None,
        away: AwayShards,
        updates: BucketUpdates,
    ) -> None:
        self.no_sync = False
        self.discards = False
        self.leaves_sums = False
        self.is_part = False
        self.asked = EVERYTHING
        self._anchors: dict[tuple[str, ...], Anchor] = {}
        self.lends = True
        self.has_added = False
        self.steps_before = 0
        self.scaler, self.away, self.updates = scaler, away, updates
        self.publish = self._publish  # called with a bucket and the names to publish
        self._arrived: set[str] = set()  # parameters with hooks that got a gradient in a backward
        self._arrived_in = -1  # the id of that backward
        self._is_apart = False
        self._store, self._slots, self._views = store, slots, views
        self._world, self._layout = store.world, store.layout
        self._sums = LocalSums(store)
        self._packed: dict[int, tuple[tuple[int, ...], ...]] = {}  # bucket -> positions packed
        self._names: dict[tuple, frozenset[str]] = {}
        # bucket in flight -> (gradient shard, whether to add, names that no_sync summed)
        self._targets: dict[int, tuple[Tensor, bool, frozenset[str]]] = {}
        self._slices = receive_buffers(store.world.device)  # the results of some reductions
        self._loans: dict[int, Loan[Tensor]] = {}  # bucket in flight -> its slice
        layout, either = self._layout, (False, True)
        self._packs_in_gradient = {  # (reduces, is_set) -> for each bucket
            (r, s): [reduction.packs_in_gradient(layout, b, s, r) for b in layout.buckets]
            for r, s in product(either, either)
        }
        self._ends = {  # (is_set, in_slot) -> for each bucket
            (s, i): [reduction.end_of(layout, b, s, i) for b in layout.buckets]
            for s, i in product(either, either)
        }
        if scaler is not None:
            store.ledger.on_step = scaler.note_step
        self._labels = [label("reduction", b) for b in self._layout.buckets]

    # -- what a schedule calls --------------------------------------------------------------
    def buffer(self, bucket: int, zero: bool = False, slot: int = -1) -> Tensor:
        """Return the flat buffer into which a bucket's gradients are packed.

        If every rank holds whole gradients and none is set yet, the buffer is p.grad's own memory.
        """
        b = self._layout.buckets[bucket]
        buffer = self._own_place(bucket)
        if buffer is None:
            buffer = self._slots.take(slot, b.numel, b.reduce_dtype)
        if zero:
            buffer.zero_()
        else:
            gaps = self._views.gaps(buffer, bucket)
            if gaps:
                foreach_zero_(gaps)
        self._packed[bucket] = ()
        return buffer

    def _own_place(self, bucket: int) -> Tensor | None:
        reduces = not (self.no_sync or self.discards or self._sums.holds(bucket))
        if not self._packs_in_gradient[reduces, False][bucket]:
            return None
        target, is_set = self._store.grads.target(bucket)
        if not self._packs_in_gradient[reduces, is_set][bucket]:
            return None
        self._targets[bucket] = target, False, frozenset()
        return target

    def pack(
        self, buffer: Tensor, bucket: int, params: tuple[int, ...], grads: Sequence[Tensor]
    ) -> None:
        """Copy gradients of the parameters at these positions into their bucket's buffer."""
        if bucket in self._targets:  # p.grad's own memory, which its views show
            shown = self._store.grads.views(bucket)
            places: Sequence[Tensor] = [shown[i] for i in params]
            if self._layout.is_cut:  # p.grad shows flat memory in this case
                members = self._layout.buckets[bucket].params
                flats = zip(places, params, strict=True)
                places = [local_of(p).view(members[i].shape) for p, i in flats]
        else:
            places = self._views.params(buffer, bucket, params)
        self._packed[bucket] += (params,)
        given = self.asked.given
        if given is None:
            foreach_copy_(places, grads)
            return
        members = self._layout.buckets[bucket].params
        for i, place, grad in zip(params, places, grads, strict=True):
            if members[i].owner in given:
                place.copy_(grad)
            else:
                place.zero_()  # the gradient for zero tangents may be NaN

    def pack_nothing(self, bucket: int, params: tuple[int, ...]) -> None:
        """Mark parameters at these positions as packed, in a buffer that was zeroed."""
        self._packed[bucket] += (params,)

    def reduce(
        self,
        buffer: Tensor,
        bucket: int,
        scale: float,
        indices: Sequence[Tensor] = (),
        over_shards: OverShards | None = None,
    ) -> Flight:
        """Launch the reduction of a packed bucket: this rank's slice of the scaled sum.

        indices: the rows that this backward has gradients for, if the bucket is a single table.
            Sums made under no_sync contain other rows, so they are reduced as a whole.
        over_shards: launches the reduction over the shard axis in another form, such as blocks.
        """
        if self.discards:
            return Flight(None, None, bucket)
        loss_scale = self.scaler.scale if self.scaler is not None else 1.0
        if self.no_sync:
            self._sums.add(bucket, buffer, self._packed_names(bucket), scale, loss_scale)
            return Flight(None, None, bucket)
        self.updates.prepare(bucket)
        if bucket not in self._targets:
            self._targets[bucket] = self._sums.settle(bucket, buffer, loss_scale)
        target, accumulate, summed = self._targets[bucket]
        end = self._ends[accumulate, self._slots.owns(buffer)][bucket]
        if end is End.GRADIENT:
            out = target
        elif end is End.PACKED:
            out = buffer
        elif end is End.LEAVING or not self.lends:
            out = torch.empty(target.numel(), dtype=buffer.dtype, device=buffer.device)
        else:
            loan = self._loans[bucket] = self._slices.borrow(target.numel(), buffer.dtype)
            out = loan.buffer[: target.numel()]
        work = None
        if indices and not summed:
            work = self._launch_rows(out, buffer, bucket, scale, indices)
        if work is None:
            work = self._world.reduce_scatter(out, buffer, scale, self._labels[bucket], over_shards)
        return Flight(out, work, bucket)

    def _launch_rows(
        self, out: Tensor, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
    ) -> Work | None:
        (leg,) = reduction.legs(self._layout.mesh)
        axis, b = self._world.axis(leg.axis), self._layout.buckets[bucket]
        return launch_rows(axis, self._layout, b, out, buffer, indices, scale, self._labels[bucket])

    def offload(self, reduced: Tensor | None, bucket: int) -> Flight | Copy:
        """Launch the copy of a reduced slice to the tier where its shard lives."""
        if reduced is None:
            return Flight(None, None, bucket)
        target, accumulate, _ = self._targets[bucket]
        b, is_scaled = self._layout.buckets[bucket], self.scaler is not None
        if self.scaler is not None:
            leaves_as = reduction.leaves_as(b, is_scaled)
            is_wide = reduced.dtype is leaves_as
            wide = reduced if is_wide else torch.empty_like(reduced, dtype=leaves_as)
            reduced = self.scaler.unscale(reduced, wide)
        is_target = reduction.lands_in_gradient(b, is_scaled, accumulate)
        return self.away.offload_grad(reduced, bucket, target if is_target else None)

    def store(self, reduced: Tensor | None, bucket: int) -> None:
        """Assign or accumulate a reduced slice into the gradients that the user sees."""
        if reduced is None:
            return
        target, accumulate, summed = self._targets.pop(bucket)
        is_away = self._layout.buckets[bucket].is_away
        scaler = None if is_away else self.scaler  # an offloaded slice is unscaled before
        if is_away and reduced is not target:
            self.away.settle(bucket)
        if scaler is not None and accumulate:
            add_unscaled_(target, reduced, scaler)
        elif accumulate:
            add_(target, reduced)
        else:
            if scaler is not None:
                is_wide = reduced.dtype is target.dtype
                reduced = scaler.unscale(reduced, reduced if is_wide else target)
            if reduced is not target:
                target.copy_(reduced)
        if (loan := self._loans.pop(bucket, None)) is not None:
            self._slices.give_back([loan])
        names = self._packed_names(bucket)
        names = names | summed if summed else names
        self.publish(bucket, names)
        self.updates.note(bucket, names)

    def hand_over(
        self,
        bucket: int,
        params: tuple[int, ...],
        grads: Sequence[Tensor],
        copied: tuple[int, ...] = (),
    ) -> None:
        """Make gradients of the parameters at these positions p.grad, or add them to it.

        copied: the positions in `grads` of those that share memory with another value.
        """
        if self.discards:
            return
        self._packed[bucket] = (params,)
        names, given = self._packed_names(bucket), self.asked.given
        if given is not None:  # the gradient for zero tangents may be NaN
            members = self._layout.buckets[bucket].params
            pairs = zip(params, grads, strict=True)
            grads = [g if members[i].owner in given else torch.zeros_like(g) for i, g in pairs]
        self._store.grads.take(bucket, params, grads, copied, names)
        self._note_arrived(names)

    def _packed_names(self, bucket: int) -> frozenset[str]:
        """Return the parameters of the bucket that get a gradient from this backward."""
        key = (bucket, self._packed[bucket])
        names = self._names.get(key)
        if names is None:
            members = self._layout.buckets[bucket].params
            names = frozenset(members[i].owner for some in key[1] for i in some)
            self._names[key] = names
        received = self.asked.received
        return names if received is None else names & received

    def anchor(self) -> Anchor:
        """Return the anchor of the parameters that currently require gradients."""
        trained = {name: p for name, p in self._store.params.items() if p.requires_grad}
        names = tuple(trained)
        if names not in self._anchors:
            self._anchors[names] = Anchor(trained)
        return self._anchors[names]

    @contextlib.contextmanager
    def apart(self, names: Collection[str]) -> Iterator[list[Tensor | None]]:
        """Fill the yielded list, when the block ends, with gradients of `names`; keep every p.grad.

        Run the backward inside the block. It finds no p.grad to add to, so it stores its gradients
        in memory of its own; the earlier p.grad are held here and restored.
        """
        params = self._store.params
        before = {name: p.grad for name, p in params.items() if p.grad is not None}
        for name in before:
            params[name].grad = None
        found: list[Tensor | None] = []
        self._is_apart = True
        try:
            yield found
            found += [params[name].grad for name in names]
        finally:
            self._is_apart = False
            for name, param in params.items():
                param.grad = before.get(name)

    @torch.no_grad()
    def hand_out(
        self, names: Sequence[str], grads: Mapping[str, Tensor], scale: Tensor, overflows: bool
    ) -> bool:
        """Add separately kept gradients, times `scale` [], to the p.grad of `names`.

        If this rank holds no elements of a parameter, its p.grad is empty, like the parameter.

        overflows: some rank has found an inf or NaN in what the loss scale had multiplied. Return
            whether they were added: a step that overflowed has no gradients.
        """
        if self.scaler is not None and self._settle_scale(self.scaler, overflows):
            return False
        is_one = scale.device.type == "cpu" and scale.item() == 1.0
        for name in names:
            param, piece = self._store.params[name], self._store.pieces[name]
            made = grads.get(name)
            if made is None:
                made = piece.show(torch.zeros_like(self._store.local_view(name)))
            elif not is_one:
                piece.local(made).mul_(scale)
            if param.grad is None:
                piece.publish(param, made)
            else:
                piece.local(param.grad).add_(piece.local(made))
        self._note_arrived(frozenset(names))
        return True

    def _publish(self, bucket: int, names: frozenset[str]) -> None:
        """Set p.grad of these parameters."""
        self._store.grads.publish(bucket, names)
        self._note_arrived(names)

    def _note_arrived(self, names: frozenset[str]) -> None:
        """Schedule the hooks of these parameters to run at the end of the whole backward."""
        hooked = self._store.ledger.hooks.keys() & names
        if hooked and not self._is_apart:
            if not self._arrived or self._arrived_in != backward_number():
                self._arrived, self._arrived_in = set(), backward_number()
                at_end_of_backward(self._run_hooks)
            self._arrived |= hooked

    @torch.no_grad()
    def _run_hooks(self) -> None:
        arrived, self._arrived = self._arrived, set()
        for name, param in self._store.params.items():
            if name in arrived and param.grad is not None:  # an overflow may have dropped it
                for hook in list(self._store.ledger.hooks[name].values()):
                    hook(param)

    # -- the end of a backward ------------------------------------------------------------------
    def finish(self) -> None:
        """End a backward: reduce the sums that no_sync left, and drop all gradients on overflow."""
        is_whole = not (self.no_sync or self.discards)
        self.updates.finish(is_whole)
        if not is_whole:
            return
        if not self.leaves_sums:
            self._reduce_left()
        if self.scaler is not None and not self.is_part:
            self._settle_scale(self.scaler, self.has_overflowed())

    @torch.no_grad()
    def _reduce_left(self) -> None:
        """Reduce no_sync sums of buckets for which this backward's program has no gradient."""
        left = self._sums.left()
        if not left:
            return
        self._world.agree("reduction of the sums of no_sync", f"buckets={list(left)}")
        for bucket, scale in left.items():
            b = self._layout.buckets[bucket]
            buffer = torch.zeros(b.numel, dtype=b.reduce_dtype, device=self._world.device)
            self._packed[bucket] = ()
            self.store(self.reduce(buffer, bucket, scale).wait(), bucket)

    @torch.no_grad()
    def has_overflowed(self) -> bool:
        """Return whether any rank has found an inf or NaN since this was last asked.

        A collective call if the loss is scaled.
        """
        if self.scaler is None:
            return False
        flag = self.scaler.take_flag()
        self._world.all_reduce(flag, label="check of the loss scale for overflow").wait()
        return bool(flag.item())

    def _settle_scale(self, scaler: LossScaler, overflows: bool) -> bool:
        """Note the end of a backward; if one of this step overflowed, drop every p.grad: True."""
        scaler.note_backward(overflows)
        if scaler.has_overflowed:
            self._sums.drop()
            for param in self._store.params.values():
                param.grad = None
        return scaler.has_overflowed

    @property
    def holds_sums(self) -> bool:
        """Whether gradients summed under no_sync still wait for their reduction."""
        return bool(self._sums.left())

    def drop_unsynced(self) -> None:
        """Drop gradients that were summed under no_sync and are not yet reduced."""
        self._sums.drop()

    def abandon(self) -> None:
        """Forget gradients that were packed, launched, or stored for an update that never ran."""
        self.updates.abandon()
        self._store.homes.abandon()
        self._store.grads.abandon()
        self._packed.clear()
        self._targets.clear()
        self._arrived.clear()
        self._loans.clear()
        self._slices = receive_buffers(self._world.device)

    def rest(self, frees: Callable[[int], bool]) -> None:
        """Free the slices for whose size in bytes `frees` returns true."""
        self._slices.rest(frees)
