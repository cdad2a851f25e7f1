"""Order of shards that live off the device: reloaded before a gather, gradients taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.meta import Role, info
from zerofx.ir.verify_buffers import Buffer, Kind, args, slot_of
from zerofx.ir.verify_copies import CopyOrder
from zerofx.ir.verify_fault import name_of
from zerofx.runtime.layout import Bucket
from zerofx.runtime.tiers import Tier

_REFRESHES = (ops.refresh, ops.refresh_shard)


class ShardOrder(CopyOrder):
    """The walk over a graph, with what moves shards and reduced slices between tiers."""

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        return super().handlers() | {
            ops.reload_shard: self.reload_shard,
            ops.refresh_shard: self.reload_shard,
            ops.read_shard: self.read_shard,
        }

    def read_shard(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        self.own_shard(node, bucket)
        if bucket.source is not Tier.NVME:
            where = f"bucket {bucket.index} ({bucket.label()}) is gathered"
            self.fail(node, f"{node.name}: {where} from the {bucket.source.value}, not from nvme")
        assert self.layout is not None
        self.numel(node, self.layout.shard_numel(bucket), f"a shard of bucket {bucket.index}")
        self.add(node, Buffer(Kind.STAGED, node, bucket.index, landed=False))

    def reload_shard(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        label = f"bucket {bucket.index} ({bucket.label()})"
        self._staged_shard(node, bucket)
        if not bucket.is_away:
            self.fail(node, f"{node.name} reloads {label}, whose shard lives on the device")
        assert self.layout is not None
        self.numel(node, self.layout.shard_numel(bucket), f"a shard of {label}")
        self.dtype(node, bucket.compute_dtype, f"a reloaded shard of {label}")
        stays, whole = node.target is ops.refresh_shard, self.layout.shard_size == 1
        if stays != (bucket.source is Tier.DEVICE) or (stays and whole):
            copied = "refresh" if whole else "refresh_shard"
            wanted = copied if bucket.source is Tier.DEVICE else "reload_shard"
            self.fail(node, f"{label} is gathered from the {bucket.source.value}: use rt.{wanted}")
        slot = -1 if stays else slot_of(node)
        kind = Kind.GATHERED if whole else Kind.NEAR
        buffer = Buffer(kind, node, bucket.index, slot, landed=False)
        buffer.behind = self.under_way(node, bucket)
        self.add(node, buffer)
        self.claim(node, buffer)

    def _staged_shard(self, node: fx.Node, bucket: Bucket) -> None:
        """Check what a reload copies: the bucket's shard, read first where that is on NVMe."""
        buffers = self.roots[args(node)[0]]
        is_staged = len(buffers) == 1 and buffers[0].kind is Kind.STAGED
        if not is_staged:
            self.own_shard(node, bucket)
        if is_staged != (bucket.source is Tier.NVME) or (
            is_staged and buffers[0].bucket != bucket.index
        ):
            given = self.label(buffers[0]) if buffers else name_of(args(node)[0])
            self.fail(
                node,
                f"{node.name} of bucket {bucket.index} ({bucket.label()}), which is gathered from "
                f"{bucket.source.value}, is given {given}",
            )

    def own_shard(self, node: fx.Node, bucket: Bucket) -> None:
        """Check that a node is given the shard of its own bucket."""
        shard = args(node)[0]
        where = info(shard)
        if where.role is not Role.SHARD or where.index != bucket.index:
            self.fail(
                node,
                f"{node.name} of bucket {bucket.index} ({bucket.label()}) is given "
                f"{name_of(shard)}, which is not its shard",
            )

    def sent_shard(self, node: fx.Node, bucket: Bucket) -> Buffer | None:
        """Check what a gather sends, the bucket's shard; return its copy there if that is away."""
        buffers = self.roots[args(node)[0]]
        if len(buffers) != 1 or buffers[0].kind is not Kind.NEAR:
            self.own_shard(node, bucket)
            return None
        if buffers[0].bucket != bucket.index:
            self.fail(
                node,
                f"{node.name} of bucket {bucket.index} ({bucket.label()}) sends the reloaded shard "
                f"of bucket {buffers[0].bucket}",
            )
        return buffers[0]

    def under_way(self, node: fx.Node, bucket: Bucket) -> Buffer | None:
        """Return the copy that another refresh of the bucket is about to bring: this one will not.

        A refresh moves nothing where the copy is current, and takes one under way for that.
        """
        if node.target not in _REFRESHES:
            return None
        mine = [b for b in self.buffers if b.bucket == bucket.index and not b.landed]
        return next((b for b in mine if b.made.target in _REFRESHES), None)

    def check_landed(self, node: fx.Node, buffer: Buffer) -> None:
        """Check that a wait delivers something: all of it has come with this launch or before."""
        first = buffer.behind
        if first is not None and not first.landed:
            self.fail(
                node,
                f"{node.name} waits for {buffer.made.name}, which moves nothing: "
                f"{first.made.name}, launched before it, does; wait for that one first",
            )

    def may_go(self, node: fx.Node, buffer: Buffer) -> None:
        """Check that a release destroys nothing that stays, or is still sent to other ranks."""
        if buffer.made.target is ops.refresh_shard:
            self.fail(
                node,
                f"{node.name} releases {self.label(buffer)}, which {buffer.made.name} keeps on the "
                "device between calls; drop the release",
            )
        sending = next((b for b in buffer.sent if not b.landed), None)
        if sending is not None:
            self.fail(
                node,
                f"{node.name} releases {self.label(buffer)} while {sending.made.name} still sends "
                "it; move the release behind that one's wait",
            )

    def wait_move(self, node: fx.Node, launch: fx.Node) -> None:
        """Let what a move delivers be read from here on."""
        (buffer,) = self.roots[launch]
        if buffer.landed:
            self.fail(node, f"{launch.name} is waited for twice, the second time by {node.name}")
        self.check_landed(node, buffer)
        buffer.landed = True
        self.roots.set(node, buffer)
