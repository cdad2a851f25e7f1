"""The gradients of one model on one rank, bucket by bucket: where they land, who sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from zerofx.compat.tensors import keep_version
from zerofx.errors import GradientError
from zerofx.runtime.param_piece import Ledger, Piece
from zerofx.runtime.param_tensor import wrap
from zerofx.runtime.shard_grads import GradShard
from zerofx.runtime.tiers import Tier


class StoreGrads:
    """A flat gradient a block of buckets, made when the first of it arrives.

    params, pieces: of the store, by canonical name.
    flats: the flat shard of each block. shards: the gradients, by block.
    """

    def __init__(
        self,
        ledger: Ledger,
        params: Mapping[str, nn.Parameter],
        pieces: Mapping[str, Piece],
        flats: Sequence[Tensor],
    ) -> None:
        self._ledger, self._layout, self._homes = ledger, ledger.layout, ledger.homes
        self._params, self._pieces, self._flats = params, pieces, flats
        self.shards: dict[int, GradShard] = {}

    def target(self, bucket: int) -> tuple[Tensor, bool]:
        """Return (flat tensor to receive the reduced gradient, whether to add to it).

        Ranges of parameters that the program has no gradient for must receive zeros.
        """
        flat, accumulate = self._shard(bucket).target(bucket)
        return self._layout.part(flat, bucket), accumulate

    def views(self, bucket: int) -> list[Tensor]:
        """Return what p.grad of the bucket's parameters shows, in order; of no tiled one."""
        return self._shard(bucket).views

    def publish(self, bucket: int, names: Collection[str] | None = None) -> None:
        """Set p.grad of the bucket's parameters (those among `names`) that require one.

        That of a tiled parameter is set when the last tile's gradient has come.
        """
        self._shard(bucket).publish(bucket, names, self._layout.owners[self._block(bucket)])

    def abandon(self) -> None:
        """Forget which tiles' gradients have come: the rest of them will not."""
        for shard in self.shards.values():
            shard.abandon()

    def drop(self, bucket: int) -> None:
        """Free a bucket's gradients; its p.grad are None."""
        self._shard(bucket).drop()

    @property
    def are_shown(self) -> bool:
        """Whether there is a gradient of an earlier backward, told by one parameter a bucket."""
        return any(shard.params[0].grad is not None for shard in self.shards.values())

    def rest(self) -> None:
        """Free large gradient shards that no p.grad shows."""
        if self._ledger.updates is not None:
            return  # freed by each update
        for shard in self.shards.values():
            shard.rest(self._layout.rest_bytes)

    # -- updates inside backward ----------------------------------------------------------------
    def begin_updates(self) -> None:
        """Check that a backward may update parameters, where that is what backward does."""
        updates = self._ledger.updates
        if updates is None:
            return
        trained = [n for n, p in self._params.items() if p.requires_grad]
        updates.begin(trained)
        for name in trained:
            if self._params[name].grad is not None:
                raise GradientError(
                    f"{name}.grad was set by hand, but Plan(update='in-backward') updates with the "
                    "gradients of one backward alone; set it to None, or use Plan(update='step')"
                )

    def prepare_update(self, bucket: int) -> None:
        """Begin to bring what a bucket's update takes into host memory, if it is on NVMe."""
        b = self._layout.buckets[bucket]
        if b.home is Tier.NVME:
            assert self._homes.nvme is not None
            self._homes.nvme.prefetch(bucket, b.dtype)

    def may_update_beside(self, names: Collection[str]) -> bool:
        """Tell whether the updates of these parameters need nothing of the main thread."""
        updates = self._ledger.updates
        return updates is not None and not updates.communicates(names)

    def take_update(self, bucket: int, names: Collection[str]) -> Callable[[], None]:
        """Take a bucket's gradients, those of `names`, from its parameters.

        Returns:
            What lets the optimizers update the bucket with them, and frees them.
        """
        updates = self._ledger.updates
        assert updates is not None
        trained = [n for n in names if self._params[n].requires_grad]
        update = updates.take(self._ledger, bucket, trained)
        shard, flat = self._shard(bucket), self._flats[self._block(bucket)]
        shard.clear()

        def run() -> None:
            with keep_version(flat):  # it tells what others write
                update()
            shard.rest(0)

        return run

    # -- a block's shard ------------------------------------------------------------------------
    def _block(self, bucket: int) -> int:
        return self._layout.block_of[bucket]

    def _shard(self, bucket: int) -> GradShard:
        block = self._block(bucket)
        shard = self.shards.get(block)
        if shard is None:
            names, members = self._layout.owners[block], self._layout.blocks[block]
            first = members[0]
            shard = GradShard(
                [self._params[n] for n in names],
                lambda: self._homes.gradient(first, self._layout.block_numel(members)),
                lambda flat: self._views_of(names, flat),
                [b.index for b in members],
                *self._homes.rests(first),
            )
            self.shards[block] = shard
        return shard

    def _views_of(self, names: Sequence[str], flat: Tensor) -> list[Tensor]:
        pieces = [self._pieces[n] for n in names]
        locals_ = [flat[p.shard_offset : p.shard_offset + p.length] for p in pieces]
        if self._layout.shard_size > 1:
            return [wrap(t, p) for t, p in zip(locals_, pieces, strict=True)]
        return [t.view(p.shape) for t, p in zip(locals_, pieces, strict=True)]
