"""Memory by tier: for the shards of buckets, their gradients, and their optimizer states.

All ranks check for space on NVMe before any of them allocates it.
"""

from __future__ import annotations

import gc
import mmap
import os
import socket
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.comm.together import together
from zerofx.comm.world import World
from zerofx.errors import NvmeError, OptimizerError
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.nvme.checksum import covering
from zerofx.nvme.faults import sized
from zerofx.nvme.folder import free_bytes, prepare
from zerofx.policy import reduction
from zerofx.runtime.schedule import full_name
from zerofx.runtime.tiers.host_tier import HostTier, host_memory
from zerofx.runtime.tiers.nvme_home import GRADIENTS, PARAMETERS, NvmeHome

ADAMW_STATES = 2  # assumed by the check of free space, each of the shard's size


class Homes:
    """Allocates memory of each tier, for one model on one rank.

    writes: a number that increases when parameters were or may have been written by others than the
        optimizer.
    host: host memory for values in transfer.
    nvme: the files, if anything lives there.
    """

    def __init__(self, device: torch.device, writes: Callable[[], int] = int) -> None:
        self._device, self._writes = device, writes
        self.host = HostTier(device)
        self.nvme: NvmeHome | None = None
        self._far: dict[int, int] = {}  # first bucket of a block on NVMe -> size in bytes
        self._trained: set[int] = set()  # those with trainable parameters when the files were made
        self._lent: set[tuple[str, int]] = set()  # places on NVMe that are in use
        # (kind, bucket) -> ranges of its place, each with a weak reference to its owner
        self._states: dict[tuple[str, int], list[tuple[int, int, Any]]] = {}
        self._maps: dict[int, mmap.mmap] = {}  # address -> the host memory there

    def open(self, folder: str | os.PathLike[str], rank: int, layout: Layout, keeps: bool) -> None:
        """Create the files of a layout's buckets that live on NVMe; `far_bytes` is their size.

        keeps: whether gradients stay between backward and the optimizer's step.

        Raises:
            NvmeError: the folder cannot be used, or has too little space; the message has both
                numbers.
        """
        far = [block for block in layout.blocks if block[0].home is Tier.NVME]
        self._far = {b[0].index: layout.block_numel(b) * b[0].dtype.itemsize for b in far}
        self._trained = {b[0].index for b in far if b[0].trainable}
        names = {b[0].index: _name(b) for b in far}
        parts = {b.index: (block[0].index, *layout.stretch(b)) for block in far for b in block}
        self.nvme = NvmeHome(folder, rank, self.host, names, parts, self._writes)
        self.nvme.need_space(far_bytes(layout, keeps), f"the data of {len(parts)} buckets")
        try:
            self._reserve(PARAMETERS, self._far)
            kept = [b for b in far if reduction.gradient_tier(b[0], not keeps) is Tier.NVME]
            if trained := self._trained & {b[0].index for b in kept}:
                self._reserve(GRADIENTS, trained)
        except BaseException:
            self.nvme.close()
            raise

    def _reserve(self, kind: str, buckets: Collection[int]) -> None:
        assert self.nvme is not None
        self.nvme.reserve(kind, {index: self._far[index] for index in buckets})

    def shard(self, bucket: Bucket, numel: int) -> Tensor:
        """Return zeros for a bucket's shard, or for the shard of a block that begins with it."""
        if bucket.home is not Tier.NVME:
            return self.zeros(numel, bucket.dtype, bucket.home)
        assert self.nvme is not None
        return self.nvme.place(PARAMETERS, bucket.index, bucket.dtype)

    def gradient(self, bucket: Bucket, numel: int) -> Tensor:
        """Return memory for the gradient of such a shard; every call returns new memory."""
        key = GRADIENTS, bucket.index
        if bucket.home is not Tier.NVME:
            return self.zeros(numel, bucket.dtype, bucket.home)
        assert self.nvme is not None
        if not self.nvme.has(*key) or key in self._lent:
            return self._passing(numel, bucket.dtype)
        self._lent.add(key)
        return self.nvme.place(GRADIENTS, bucket.index, bucket.dtype)

    def state_at(self, key: str, bucket: Bucket, offset: int) -> int | None:
        """Return the address of a bucket's state on NVMe, or None if it has no place there."""
        if self.nvme is None or not self.nvme.has(key, bucket.index):
            return None
        return self.nvme.place(key, bucket.index, bucket.dtype)[offset:].data_ptr()

    def state(
        self, key: str, bucket: Bucket, numel: int, offset: int, owner: Any, keeps: bool = False
    ) -> Tensor:
        """Return zeros for an optimizer state of `numel` elements, starting at `offset` of a shard.

        owner: a weak reference to the optimizer that owns it.
        keeps: whether the values already there are kept.

        Raises:
            OptimizerError: another optimizer has the same place and still exists.
        """
        if bucket.home is not Tier.NVME:
            return self.zeros(numel, bucket.dtype, bucket.home)
        assert self.nvme is not None
        if not self.nvme.has(key, bucket.index):
            # otherwise it was frozen when the files were made
            is_trained = bucket.index in self._trained
            self._reserve(key, self._trained if is_trained else {bucket.index})
        held = self.nvme.place(key, bucket.index, bucket.dtype)[offset : offset + numel]
        ranges = self._states.setdefault((key, bucket.index), [])
        earlier = [w for start, stop, w in ranges if start < offset + numel and offset < stop]
        if any(w() not in (None, owner()) for w in earlier):
            gc.collect()  # schedulers hold optimizers in reference cycles
        if any(w() not in (None, owner()) for w in earlier):
            raise OptimizerError(
                f"{bucket.label()}: {key} on NVMe belongs to another optimizer, which still "
                "exists. Drop it (del optimizer, and its schedulers) before the new one steps, or "
                "keep optimizer states on the host (Plan.offload.optimizer = 'cpu')."
            )
        if earlier and not keeps:
            held.zero_()
        ranges[:] = [(a, b, w) for a, b, w in ranges if w() is not None]
        ranges.append((offset, offset + numel, owner))
        return held

    def sleep_and_wake(
        self, bucket: Bucket
    ) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        """Return functions that free a bucket's gradient between steps and make it usable again."""
        if bucket.home is Tier.DEVICE:
            return shrink, regrow
        return self._drop_pages, _nothing

    def _drop_pages(self, flat: Tensor) -> None:
        if (held := self._maps.get(flat.data_ptr())) is not None:
            held.madvise(mmap.MADV_DONTNEED)

    def zeros(self, numel: int, dtype: torch.dtype, tier: Tier) -> Tensor:
        """Return `numel` zeros on the device or the host, there outside torch's allocator."""
        with torch.inference_mode(False):
            if tier is Tier.DEVICE:
                return torch.zeros(numel, dtype=dtype, device=self._device)
            memory, _ = host_memory(numel * dtype.itemsize, self._device)
            return memory.view(dtype)

    def _passing(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host zeros whose memory is given back between backward passes."""
        memory, held = host_memory(numel * dtype.itemsize, self._device)
        with torch.inference_mode(False):
            flat = memory.view(dtype)
        if held is not None:
            self._maps[flat.data_ptr()] = held
            weakref.finalize(flat, self._maps.pop, flat.data_ptr(), None)
        return flat

    def abandon(self) -> None:
        """Drop transfers to and from NVMe that are in flight, after an exception."""
        if self.nvme is not None:
            self.nvme.drain()

    def drop_early(self) -> None:
        """Drop reads from NVMe for updates that did not happen."""
        if self.nvme is not None:
            self.nvme.drop_early()

    def fetch(self, view: Tensor) -> Tensor:
        """Return the values of a tensor, read into host memory if it is on NVMe."""
        return view if self.nvme is None else self.nvme.fetch(view)

    def release(self, view: Tensor) -> None:
        """Give back the memory taken by reading one tensor, if it is on NVMe."""
        if self.nvme is not None:
            self.nvme.release(view)

    def rest(self) -> None:
        """Give back the memory taken by reading parameters on NVMe."""
        if self.nvme is not None:
            self.nvme.rest()


def _name(block: Sequence[Bucket]) -> str:
    """Return the name of a block for errors: a tiled parameter, or its only bucket."""
    tile = block[0].tile
    return full_name(block[0]) if tile is None else f"{tile.name} ({tile.count} tiles)"


def far_bytes(layout: Layout, keeps: bool) -> int:
    """Return a rank's bytes on NVMe: parameters, AdamW states, and gradients if `keeps`."""
    far = [b for b in layout.buckets if b.home is Tier.NVME]
    sizes = [(layout.shard_numel(b) * b.dtype.itemsize, b.trainable) for b in far]
    return sum(size * (1 + is_trained * (ADAMW_STATES + keeps)) for size, is_trained in sizes)


def staged_bytes(layout: Layout, bucket: int) -> int:
    """Return the bytes read from NVMe into host memory for a bucket's shard."""
    first, last = covering(*layout.stretch(layout.buckets[bucket]))
    return last - first


def shrink(flat: Tensor) -> None:
    """Free a flat tensor's memory; the tensor and its views stay."""
    flat.untyped_storage().resize_(0)


def regrow(flat: Tensor) -> None:
    """Allocate a flat tensor's memory again."""
    flat.untyped_storage().resize_(flat.nbytes)


def _nothing(flat: Tensor) -> None:
    """Do nothing: pages come back by themselves with the next write."""


@dataclass(frozen=True)
class _Claim:
    """The bytes that a rank will need in a folder, and the free space of its file system."""

    where: tuple[str, int]  # host and device: ranks that share both share the space
    needed_bytes: int
    free_bytes: int


def claim_space(world: World, folder: str, layout: Layout, keeps: bool) -> None:
    """Check on every rank that there is space for all ranks' files together; a collective call.

    keeps: whether gradients stay between backward and the optimizer's step.

    Raises:
        NvmeError: on every rank, if a folder cannot be used or has too little space for the ranks
            that share it; the message has both numbers.
    """
    needed = far_bytes(layout, keeps)

    def claim() -> _Claim:
        home = prepare(folder)
        where = socket.gethostname(), os.stat(home).st_dev
        return _Claim(where, needed, free_bytes(home))

    claims = together(world, f"check of {folder} for data on NVMe", claim, NvmeError)
    num_buckets = sum(b.home is Tier.NVME for b in layout.buckets)
    for where in dict.fromkeys(c.where for c in claims):
        ranks = [rank for rank, c in enumerate(claims) if c.where == where]
        asked = sum(claims[rank].needed_bytes for rank in ranks)
        free = min(claims[rank].free_bytes for rank in ranks)
        if asked > free:
            raise NvmeError(
                f"{folder} on {where[0]}: parameters, gradients and AdamW's states of "
                f"{num_buckets} buckets need {sized(asked)} ({_say(ranks)}), but {sized(free)} are "
                "free. Free space there, choose another path, or offload less."
            )


def check_folder(world: World, folder: str) -> None:
    """Check on every rank that a folder can be used; a collective call.

    Raises:
        NvmeError: it cannot be, on some rank.
    """
    together(world, f"check of {folder}", lambda: str(prepare(folder)), NvmeError)


def _say(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
