"""The tasks of the optimizer: in `step()` behind all backward passes, or bucket by bucket in one.

What lives on the device is updated by the compute lane, what lives on the host by the host, and
what lives on NVMe passes through host memory, as `policy/staging.py` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.task import TaskList
from zerofx.ir.meta import Info, info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, kind_of
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.policy import staging
from zerofx.policy.staging import Move
from zerofx.runtime.tiers.homes import ADAMW_STATES

STEP = "step"


def step_tasks(
    program: Planned, found: TaskList, stored: Mapping[int, int | None], clips: bool
) -> None:
    """Append the optimizer's step over every bucket that backward has not updated.

    stored: bucket -> the task after which its gradient can be used.
    """
    layout = program.layout
    if not program.is_laid_out:
        return
    found.graph = STEP
    updated = {info(n).index for n in program.graph(BACKWARD).nodes if kind_of(n) is Kind.UPDATE}
    left = [b for b in layout.buckets if b.index in stored and b.index not in updated]
    trained = sum(len(b.params) for b in left)
    found.hosts("call", "call", found.prices.call(STEP, trained, program.world_size))
    if not left:
        return
    if clips:
        _clip(program, found, layout, left, stored)
    _on_device(found, layout, [b for b in left if b.home is Tier.DEVICE])
    for bucket in (b for b in left if b.home is Tier.HOST):
        price = found.prices.update(Tier.HOST, layout.shard_numel(bucket))
        needs = [stored[bucket.index], found.host, found.compute if clips else None]
        task = found.add(Lane.UPDATE, "update", _name(bucket), price, needs, _where(bucket))
        found.ended.add(task)
    _staged(found, layout, [b for b in left if b.home is Tier.NVME], stored, clips)


def _name(bucket: Bucket) -> str:
    return f"update b{bucket.index}"


def _where(bucket: Bucket) -> Info:
    return Info(unit=bucket.label(), index=bucket.index)


def _on_device(found: TaskList, layout: Layout, buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        price = found.prices.update(Tier.DEVICE, layout.shard_numel(bucket))
        found.computes("update", _name(bucket), price, _where(bucket))


def _clip(
    program: Planned, found: TaskList, layout: Layout, buckets: Sequence[Bucket],
    stored: Mapping[int, int | None],
) -> None:  # fmt: skip
    """Append the global norm: one pass over the gradients, and a sum over the ranks."""
    near, away = (
        sum(layout.shard_numel(b) * b.dtype.itemsize for b in buckets if b.is_away is is_away)
        for is_away in (False, True)
    )
    if near:
        found.computes("clip", "norm", found.prices.touch(near))
    if away:
        needs = [t for b in buckets if b.is_away and (t := stored[b.index]) is not None]
        found.hosts("clip", "norm", found.prices.touch(away, Tier.HOST), needs=needs)
    if program.world_size > 1:
        price = found.prices.collective("all_reduce", 8, program.world_size, 1)
        norm = found.moves(Lane.REDUCE, "AR norm", price, beside=True)
        found.ended.add(norm)
        found.computes("clip", "factor", found.prices.touch(8))


def _staged(
    found: TaskList, layout: Layout, buckets: Sequence[Bucket], stored: Mapping[int, int | None],
    clips: bool,
) -> None:  # fmt: skip
    """Append updates of what lives on NVMe, in the order that `policy/staging.py` gives.

    `step()` runs updates itself and waits for writes: what it launches then comes after both.
    """
    begin = [found.host, found.compute]
    updated: int | None = None  # the last update
    waited: int | None = None  # the last write that `step()` has waited for
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for move, k in staging.step_order(len(buckets)):
        bucket, where = buckets[k], _where(buckets[k])
        numel = layout.shard_numel(bucket)
        size = numel * bucket.dtype.itemsize * (1 + ADAMW_STATES)
        if move is Move.READ:
            price, needs = found.prices.copy(Lane.NVME, size), [*begin, updated, waited]
            reads[k] = found.add(Lane.NVME, "transfer", f"RD b{bucket.index}", price, needs, where)
        elif move is Move.UPDATE:
            price = found.prices.update(Tier.HOST, numel)
            needs = [reads[k], stored[bucket.index], found.host, waited]
            updated = found.add(Lane.UPDATE, "update", _name(bucket), price, needs, where)
            price = found.prices.copy(Lane.TO_NVME, size)
            writes[k] = found.add(
                Lane.TO_NVME, "transfer", f"WR b{bucket.index}", price, [updated], where
            )
        else:
            waited = writes[k]
    found.ended.update(writes.values())


def update_beside(found: TaskList, layout: Layout, bucket: Bucket, needs: Sequence[int]) -> int:
    """Append an update inside backward of what lives off the device; return what ends it."""
    before = [*needs, found.host, found.compute]
    size = layout.shard_numel(bucket) * bucket.dtype.itemsize * (1 + ADAMW_STATES)
    where = _where(bucket)
    if bucket.home is Tier.NVME:
        price = found.prices.copy(Lane.NVME, size)
        read = found.add(Lane.NVME, "transfer", f"RD b{bucket.index} states", price, before, where)
        before.append(read)
    price = found.prices.update(Tier.HOST, layout.shard_numel(bucket))
    task = found.add(Lane.UPDATE, "update", _name(bucket), price, before, where)
    if found.prices.is_inline:
        found.ended.add(task)
    if bucket.home is Tier.NVME:
        price = found.prices.copy(Lane.TO_NVME, size)
        task = found.add(Lane.TO_NVME, "transfer", f"WR b{bucket.index}", price, [task], where)
    return task
