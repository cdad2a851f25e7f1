"""assign-buckets: decide which parameters share a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx.ir.program import Planned
from zerofx.layout.buckets import Layout
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import plan_layout, unit_params
from zerofx.plan.plan import Plan


@dataclass(frozen=True)
class AssignBuckets(Pass):
    """Assign units to buckets and merge small neighbours up to `bucket_bytes`.

    If the running model already has a layout (`layout`), that layout is used unchanged, so that
    every program of a model reads the same shards.
    """

    name: ClassVar[str] = "assign-buckets"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETS_ASSIGNED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})

    plan: Plan
    world_size: int
    persist_below: int
    bucket_bytes: int
    layout: Layout | None = None

    def run(self, program: Planned) -> Report:
        params = unit_params(program.params.values(), self.plan.precision)
        layout = self.layout or plan_layout(
            params, self.plan, self.world_size, self.persist_below, self.bucket_bytes,
            program.stage.position % self.plan.parallel.pipeline,
        )  # fmt: skip
        program.layout = layout
        program.world_size = self.world_size
        units = {p.unit for p in params}
        return Report(True, f"{len(units)} units in {len(layout.buckets)} buckets")

    def options(self) -> dict[str, object]:
        return {
            "stage": self.plan.stage,
            "persist_below": self.persist_below,
            "bucket_bytes": self.bucket_bytes,
        }
