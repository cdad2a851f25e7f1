"""Gradients: one flat shard a bucket, seen through views or wrappers that are made once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from zerofx.compat.tensors import local_tensor, require_grad, storage_uses
from zerofx.runtime.homes import regrow, shrink
from zerofx.runtime.param_tensor import ShardedTensor

MakeViews = Callable[[Tensor], list[Tensor]]


def _local(grad: Tensor) -> Tensor:
    return local_tensor(grad) if isinstance(grad, ShardedTensor) else grad


class GradShard:
    """The reduced gradient of one bucket on one rank, and what each `p.grad` shows of it.

    `views[i]` is what `params[i].grad` becomes: a wrapper of a range of the flat shard, or (where
    nothing is sharded) a plain view of it.

    allocate: returns memory for the flat shard. sleep, wake: free it between steps, its address
        kept, and make it usable again; None where it is not to be freed.
    buckets: several are the tiles of one parameter, whose gradients come one by one in each
    backward: the first decides for all whether they are added, the last one is published.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        allocate: Callable[[], Tensor],
        make: MakeViews,
        buckets: Sequence[int] = (),
        sleep: Callable[[Tensor], None] | None = shrink,
        wake: Callable[[Tensor], None] = regrow,
    ) -> None:
        self.params = params
        self._allocate, self._sleep, self._wake_up = allocate, sleep, wake
        self._buckets = buckets
        self._expected: set[int] = set()  # tiles whose gradients this backward has yet to publish
        self._decided: tuple[Tensor, bool]
        self._make = make
        self._asleep = False
        self._adopt(allocate())

    def _adopt(self, flat: Tensor) -> None:
        with torch.no_grad():
            self.flat = flat
            self.views = self._make(flat)
        self._quiet = self._references()

    def _references(self) -> list[int]:
        """Count who refers to the views, their local tensors and their storage."""
        counts = [sys.getrefcount(v) for v in self.views]
        counts += [sys.getrefcount(_local(v)) for v in self.views]
        counts.append(storage_uses(self.flat))
        return counts

    def _is_held(self) -> bool:
        """Whether anyone but us and `p.grad` still refers to a gradient of an earlier step.

        Raised counts of views that are some p.grad now are theirs by right.
        """
        counts = self._references()
        num = len(self.views)
        if counts[-1] != self._quiet[-1]:
            return True
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            published = param.grad is view
            if not published and (
                counts[i] > self._quiet[i] or counts[num + i] > self._quiet[num + i]
            ):
                return True
        return False

    def rest(self, least_bytes: int) -> None:
        """Free the flat's memory while no gradient is set or held; views stay."""
        stays = self._sleep is None or self.flat.nbytes < least_bytes
        if self._asleep or stays or any(p.grad is not None for p in self.params):
            return
        if not self._is_held():  # counted before the storage object below is one more reference
            assert self._sleep is not None
            self._sleep(self.flat)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._wake_up(self.flat)
            self._asleep = False

    def drop(self) -> None:
        """Set every p.grad to None and free the flat's memory."""
        self.clear()
        self.rest(0)

    def clear(self) -> None:
        """Set every p.grad to None."""
        for param in self.params:
            param.grad = None

    def target(self, bucket: int) -> tuple[Tensor, bool]:
        """Return the flat shard to reduce into, and whether to add to what it holds."""
        if len(self._buckets) <= 1:
            return self._target()
        if not self._expected:
            self._decided, self._expected = self._target(), {*self._buckets}
        assert bucket in self._expected, f"bucket {bucket} is reduced twice in one backward"
        return self._decided

    def abandon(self) -> None:
        """Take it that no more tiles of this backward come."""
        self._expected.clear()

    def _target(self) -> tuple[Tensor, bool]:
        """Decide where all of it is reduced into, and whether to add.

        Where some p.grad are set and others are not, the others' ranges are zeroed and the
        user's own tensors copied in, so that adding is right for all; `publish` copies the sums
        back into these. What the user still holds of an earlier step is left to them.
        """
        self._wake()
        grads = [p.grad for p in self.params]
        if all(map(is_, grads, self.views)):
            return self.flat, True
        if not any(g is not None for g in grads):
            del grads
            if self._is_held():
                self._adopt(self._allocate())
            return self.flat, False
        if self._is_held():
            self._adopt(self._allocate())
        with torch.no_grad():
            for view, grad in zip(self.views, grads, strict=True):
                if grad is None:
                    _local(view).zero_()
                elif grad is not view:
                    _local(view).copy_(_local(grad))
        return self.flat, True

    def publish(self, bucket: int, names: Collection[str] | None, all_names: Sequence[str]) -> None:
        """Set p.grad of every parameter among `names` that requires one, once all tiles are in.

        A tensor of the user's own stays p.grad, with the new values.
        """
        self._expected.discard(bucket)
        if self._expected:
            return
        trained = require_grad(self.params)
        rows = zip(self.params, trained, self.views, all_names, strict=True)
        for param, is_trained, view, name in rows:
            if is_trained and (names is None or name in names):
                before = param.grad
                if before is None:
                    if isinstance(param, ShardedTensor):
                        param._grad = view  # cut like it: the check of p.grad = ... is not needed
                    else:
                        param.grad = view
                elif before is not view:
                    with torch.no_grad():
                        _local(before).copy_(_local(view))
