"""Updates in backward: each once, behind its gradient and behind every read of its shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Fact
from zerofx.ir.program import Program
from zerofx.ir.verify_buffers import FULL, Kind, args
from zerofx.ir.verify_gradients import GradientOrder
from zerofx.ir.verify_sources import Crossing


class BackwardOrder(GradientOrder):
    """Order in backward: gradients, and what becomes of the parameters there."""

    def __init__(self, program: Program, graph: str, crossing: Crossing) -> None:
        super().__init__(program, graph, crossing)
        self._updates: dict[int, fx.Node] = {}

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        return super().handlers() | {ops.update: self.update}

    def update(self, node: fx.Node) -> None:
        bucket, (stored, shard) = self.bucket(node, 2), args(node)[:2]
        label = f"bucket {bucket.index} ({bucket.label()})"
        if bucket.index in self._updates:
            first = self._updates[bucket.index].name
            self.fail(node, f"{label} is updated twice: by {first} and by {node.name}")
        reduced = self._reduced.get(bucket.index)
        if reduced is None or reduced.stored is not stored:
            self.fail(node, f"{node.name} updates {label} with {stored}, which is not its gradient")
        held = self.roots[shard]
        is_shard = shard.op == "placeholder" and len(held) == 1 and held[0].kind is Kind.SHARD
        if not is_shard or held[0].bucket != bucket.index:
            self.fail(node, f"{node.name} updates {label}, but is given {shard} as its shard")
        for buffer in self.buffers:
            is_sent = buffer.kind in (*FULL, Kind.STAGED, Kind.NEAR) and not buffer.landed
            if buffer.bucket == bucket.index and is_sent:
                self.fail(
                    node,
                    f"{node.name} overwrites the shard of {label} while {buffer.made.name} still "
                    "sends it; move the update behind the wait",
                )
        held[0].updated = self._updates[bucket.index] = node
        if self._is_followed(bucket.index):
            for buffer in self.buffers:
                if buffer.bucket == bucket.index and buffer.kind in (Kind.RESIDENT, Kind.NEAR):
                    buffer.updated = node

    def _is_followed(self, bucket: int) -> bool:
        """Tell whether what an update leaves of a bucket goes into the copies that stay."""
        layout, plan = self.program.layout, self.program.plan
        is_delayed = plan is not None and plan.offload.delayed
        return layout is not None and not is_delayed and bucket in layout.far_buckets

    def finish(self) -> None:
        """Check that backward updates every bucket that it reduces, or none."""
        super().finish()
        output = self.program.graph(self.name).output_node()
        plan = self.program.plan
        in_backward = plan is not None and plan.update == "in-backward"
        if self._updates and not in_backward:
            node = next(iter(self._updates.values()))
            self.fail(node, f"{node.name} updates parameters, but the plan's update is 'step'")
        if not in_backward or Fact.UPDATES_PLACED not in self.program.facts:
            return
        for index, buffer in self._reduced.items():
            if index not in self._updates:
                self.fail(output, f"{self.label(buffer)} is never updated; its gradient is lost")
