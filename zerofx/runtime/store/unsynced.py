"""Gradients under no_sync: summed separately on each rank until the first backward outside.

`p.grad` shows that a sum exists. Clearing it (with the optimizer's or the model's `zero_grad`, or
with `p.grad = None`) drops the sum, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.compat.tensors import DisableTorchFunctionSubclass, foreach_zero_, make_subclass
from zerofx.errors import GradientError
from zerofx.policy import reduction
from zerofx.runtime.sums import add_
from zerofx.runtime.tensors.refuse import op_name
from zerofx.runtime.tensors.tensor import first_of

if TYPE_CHECKING:
    from zerofx.layout.buckets import Bucket
    from zerofx.runtime.store.shards import ShardStore

_ZERO = ("zero_", foreach_zero_.__name__)
_READABLE = ("device", "dtype", "layout", "requires_grad", "is_complex")


class Unreduced(Tensor):
    """One parameter's range of this rank's sum: the local tensor of its `p.grad` until reduced.

    It can be zeroed. Every other operation raises, since the gradient is not known before the
    reduction, and using this rank's sum instead would be silently wrong.
    """

    param_name: str
    before: Tensor | None  # the reduced gradient that p.grad showed, to which the sum is added

    @staticmethod
    def of(values: Tensor, name: str, before: Tensor | None) -> Unreduced:
        """Return the range `values` of a sum, sharing its memory."""
        out: Unreduced = make_subclass(Unreduced, values)
        out.param_name, out.before = name, before
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        op = op_name(func)
        if op in _READABLE:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if op in _ZERO and not kwargs:
            for tensor in args[0] if op == foreach_zero_.__name__ else args:
                _zero(tensor)
            return args[0]
        found = first_of(Unreduced, (args, kwargs))
        assert found is not None, f"{op}: no unreduced gradient among its arguments"
        raise GradientError(
            f"{found.param_name}: {op} of a gradient that no_sync has summed only on each rank. "
            "Run the last backward of a step outside no_sync, which reduces the sum, or drop it "
            "with zero_grad()."
        )


@torch.no_grad()
def _zero(tensor: Tensor) -> None:
    if isinstance(tensor, Unreduced):
        with DisableTorchFunctionSubclass():
            torch.Tensor.zero_(tensor)
        if tensor.before is not None:
            tensor.before.zero_()
    else:
        tensor.zero_()


class _Sum:
    """This rank's whole sum for one sharded block, and the p.grad of each parameter in it."""

    def __init__(self, store: ShardStore, block: tuple[Bucket, ...], buffer: Tensor) -> None:
        """Start with zeros in the shards' dtype, not in the dtype of reductions."""
        numel, dtype = reduction.sum_form(block)
        full = torch.zeros(numel, dtype=dtype, device=buffer.device)
        self._parts = dict(
            zip([b.index for b in block], full.tensor_split(len(block)), strict=True)
        )
        self._store = store
        self._marks: dict[str, tuple[Any, Unreduced]] = {}
        self._ranges = {p.name: full[p.offset : p.end] for p in block[0].params}
        if len(block) > 1:  # tiles of one parameter, consecutive in memory
            self._ranges = {block[0].params[0].owner: full}
        self._settled: frozenset[str] | None = None

    def part(self, bucket: int) -> Tensor:
        """Return the sum of one bucket of the block."""
        return self._parts[bucket]

    def mark(self, names: Collection[str]) -> None:
        """Let p.grad of these parameters represent their part of the sum."""
        for name in names:
            param = self._store.params[name]
            if name in self._marks or not param.requires_grad:
                continue
            inner = Unreduced.of(self._ranges[name], name, param.grad)
            shown = self._store.pieces[name].show(inner)
            param.grad = shown
            self._marks[name] = shown, inner

    def forget_cleared(self) -> Collection[str]:
        """Drop sums of parameters whose p.grad was replaced since; return the remaining names."""
        for name, (shown, _) in list(self._marks.items()):
            if self._store.params[name].grad is not shown:
                self._ranges[name].zero_()
                del self._marks[name]
        return self._marks.keys()

    def unmark(self) -> frozenset[str]:
        """Restore each earlier p.grad, once; return the names with a sum."""
        if self._settled is None:
            self._settled = frozenset(self.forget_cleared())
            for name in self._settled:
                self._store.params[name].grad = self._marks.pop(name)[1].before
        return self._settled


class LocalSums:
    """All sums of no_sync on this rank, by bucket; the tiles of a parameter share one sum.

    If parameters are sharded, the sum is a whole bucket next to the gradient shard, and p.grad is
    an unreadable placeholder. If every rank holds whole parameters, the sum is in p.grad itself, as
    under DistributedDataParallel: changes to p.grad change the sum.
    """

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._lie_apart = reduction.sums_lie_apart(store.layout)
        self._scales: dict[int, float] = {}  # bucket with a sum -> scale of its reduction
        self._sums: dict[int, _Sum] = {}  # by block

    def add(
        self,
        bucket: int,
        buffer: Tensor,
        names: Collection[str],
        scale: float,
        loss_scale: float = 1.0,
    ) -> None:
        """Add a packed bucket, of which `names` have gradients, to the unscaled sum."""
        self._scales[bucket] = scale
        if not self._lie_apart:
            target, accumulate = self._store.grads.target(bucket)
            if accumulate:
                add_(target, buffer, 1.0 / loss_scale)
            else:
                torch.mul(buffer, 1.0 / loss_scale, out=target)
            self._store.grads.publish(bucket, names)
            return
        block = self._store.layout.block_of[bucket]
        held = self._sums.get(block)
        if held is None:
            held = self._sums[block] = _Sum(self._store, self._store.layout.blocks[block], buffer)
        else:
            held.forget_cleared()
        add_(held.part(bucket), buffer, 1.0 / loss_scale)
        held.mark(names)

    def holds(self, bucket: int) -> bool:
        """Return whether a sum of this bucket is waiting for its reduction."""
        return bucket in self._scales

    def settle(
        self, bucket: int, buffer: Tensor, loss_scale: float = 1.0
    ) -> tuple[Tensor, bool, frozenset[str]]:
        """Add the sum to a bucket that is about to be reduced.

        Returns:
            The tensor to reduce into, whether to add to its contents, and the parameters that get a
            gradient from the sum.
        """
        if self._scales.pop(bucket, None) is None:
            return *self._store.grads.target(bucket), frozenset()
        layout = self._store.layout
        block = layout.block_of[bucket]
        held = self._sums.get(block)
        if held is not None:
            names = held.unmark()
            if names:
                add_(buffer, held.part(bucket), loss_scale)
            if not any(b.index in self._scales for b in layout.blocks[block]):
                del self._sums[block]
            return *self._store.grads.target(bucket), names
        target, is_set = self._store.grads.target(bucket)
        if not is_set:
            return target, False, frozenset()
        # The sum includes the earlier reduced gradient, which is equal on all ranks, as is its
        # mean.
        add_(buffer, target, loss_scale)
        params = self._store.params
        shown = (n for n in layout.buckets[bucket].names if params[n].grad is not None)
        return target, False, frozenset(shown)

    def left(self) -> dict[int, float]:
        """Return the buckets whose sums still wait for a reduction, in order, with its scale."""
        for bucket in list(self._scales):
            if not self._is_waiting(bucket):
                del self._scales[bucket]
                self._sums.pop(self._store.layout.block_of[bucket], None)
        return dict(sorted(self._scales.items()))

    def _is_waiting(self, bucket: int) -> bool:
        if self._lie_apart:
            held = self._sums.get(self._store.layout.block_of[bucket])
            return held is not None and bool(held.forget_cleared())
        names = self._store.layout.buckets[bucket].names
        return any(self._store.params[n].grad is not None for n in names)

    def drop(self) -> None:
        """Forget all sums; p.grad of their parameters becomes None."""
        for bucket in self.left():
            held = self._sums.get(self._store.layout.block_of[bucket])
            names = self._store.layout.buckets[bucket].names if held is None else held.unmark()
            for name in names:
                self._store.params[name].grad = None
        self._scales.clear()
        self._sums.clear()
