"""Order of gathers: launched from their own shard, waited for, viewed at the layout's offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.meta import value
from zerofx.ir.program import BACKWARD, FORWARD
from zerofx.ir.verify_buffers import FULL, Buffer, Kind, args, slot_of
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_shards import ShardOrder
from zerofx.runtime.layout import Bucket
from zerofx.runtime.tiers import Tier


class Order(ShardOrder):
    """The walk over a graph, with what gathers, waits, views and releases do."""

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        return super().handlers() | {
            ops.all_gather: self.gather,
            ops.refresh: self.gather,
            ops.resident: self.gather,
            ops.wait: self.wait,
            ops.param_view: self.view,
            ops.release: self.release,
            ops.sync_buffers: self.sync,
        }

    def gather(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        near = self.sent_shard(node, bucket)
        self.numel(node, bucket.numel, f"bucket {bucket.index}")
        self.dtype(node, bucket.compute_dtype, f"bucket {bucket.index} gathered")
        if node.target is ops.all_gather:
            kind, slot = Kind.GATHERED, slot_of(node)
        else:
            kind, slot = Kind.RESIDENT, -1
            self._may_stay(node, bucket)
        if node.target is ops.resident and (
            self.name != BACKWARD or bucket.index not in self.crossing.refreshed
        ):
            self.fail(
                node,
                f"{node.name} takes bucket {bucket.index} as forward left it, but forward did not "
                "refresh it; use rt.refresh and wait for it",
            )
        if node.target is ops.refresh and self.name == FORWARD:
            self.crossing.refreshed.add(bucket.index)
        landed = node.target is ops.resident
        buffer = Buffer(kind, node, bucket.index, slot, landed=landed)
        buffer.behind = self.under_way(node, bucket)
        if near is not None:
            near.sent.append(buffer)
        self.add(node, buffer)
        self.claim(node, buffer)

    def _may_stay(self, node: fx.Node, bucket: Bucket) -> None:
        stage = getattr(self.program.plan, "stage", None)
        assert self.layout is not None
        is_copy = self.layout.shard_size == 1 and bucket.is_away and bucket.source is Tier.DEVICE
        if stage == 3 and not bucket.persistent and not is_copy:
            self.fail(
                node,
                f"{node.name} keeps bucket {bucket.index} ({bucket.label()}) gathered between "
                "calls; at stage 3 only the persistent bucket is: use rt.all_gather and release it",
            )

    def wait(self, node: fx.Node) -> None:
        launch = args(node)[0]
        if launch.target in ops.COPIES:
            self.wait_copy(node, launch)
            return
        if launch.target in ops.MOVES:
            self.wait_move(node, launch)
            return
        if launch.target not in ops.LAUNCHES:
            self.fail(node, f"{node.name} waits for {name_of(launch)}, which launches nothing")
        (buffer,) = self.roots[launch]
        if buffer.released is not None or buffer.taken is not None:
            self.fail(node, f"{node.name} waits for {self.label(buffer)} after its release")
        self.check_landed(node, buffer)
        buffer.landed = True
        if buffer.source is not None:
            buffer.source.landed = True
        self.roots.set(node, buffer)

    def view(self, node: fx.Node) -> None:
        full, offset, shape = args(node)
        self.roots.follow(node)
        buffers = self.roots[full]
        is_whole = isinstance(full, fx.Node) and full.target is not ops.param_view
        kinds = {b.kind for b in buffers}
        if len(buffers) != 1 or not is_whole or not kinds <= {*FULL, Kind.SHARD}:
            self.fail(node, f"{node.name} looks into {full}, which is no gathered bucket")
        index = buffers[0].bucket
        assert self.layout is not None
        bucket = self.layout.buckets[index]
        if value(full).numel() != bucket.numel:
            self.fail(node, f"{node.name} looks into a shard of bucket {index}; gather it first")
        self.dtype(node, bucket.compute_dtype, f"what is computed with of bucket {index}")
        param = bucket.at.get(offset)
        if (param is None or [*param.shape] != [*shape]) and node.users:
            self.fail(
                node,
                f"{node.name} at offset {offset} with shape {list(shape)} is no parameter of "
                f"bucket {index} ({bucket.label()}); the layout in fingerprint.json has the places",
            )

    def release(self, node: fx.Node) -> None:
        buffers = self.roots[args(node)[0]]
        if len(buffers) != 1 or buffers[0].kind not in (Kind.GATHERED, Kind.NEAR):
            self.fail(node, f"{node.name} releases {args(node)[0]}, which is no gathered bucket")
        buffer = buffers[0]
        if slot_of(node) != buffer.slot:
            self.fail(
                node,
                f"{node.name} gives back slot {slot_of(node)}, but {self.label(buffer)} lies in "
                f"slot {buffer.slot}",
            )
        self.may_go(node, buffer)
        buffer.released = buffer.released or node

    def sync(self, node: fx.Node) -> None:
        if self.name == BACKWARD:
            self.fail(node, f"{node.name}: sync_buffers takes what forward makes of buffers")
