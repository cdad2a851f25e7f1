"""Positions for communication: between regions. Shared by the passes that insert or move it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zerofx.errors import ShardError
from zerofx.ir.graphs import regions
from zerofx.ir.meta import Role, info
from zerofx.ir.program import ParamInfo, Planned
from zerofx.layout.buckets import LOW_OR_SINGLE, Bucket, Layout
from zerofx.layout.build import UnitParam, merge_small, unit_layout
from zerofx.layout.tiers import TIER_OF, Tier
from zerofx.plan.fields import Patterns
from zerofx.plan.parts import Offload
from zerofx.plan.plan import Plan, Precision


def plan_layout(
    params: Iterable[UnitParam], plan: Plan, world_size: int, persist_below: int, bucket_bytes: int,
    position: int = 0,
) -> Layout:  # fmt: skip
    """Return the buckets of a model: a function of model, plan, machine table and world alone.

    Stage 0 is sharded over one rank and replicated over all. Stages 1 and 2 keep every parameter
    gathered, so `persist_below` matters at stage 3 only. Under a memory budget, units are merged
    only up to the size of the largest unit, whose buffers exist in any case, unless the plan sets
    the bucket size.

    position: the pipeline stage of the rank.
    """
    params = list(params)
    shard_size, replicate_size = plan.axis_sizes(world_size)
    persist = persist_below if plan.stage == 3 and shard_size > 1 else 0
    parallel = plan.parallel
    layout = unit_layout(
        params, shard_size, replicate_size, persist, parallel.tensor, parallel.pipeline,
        parallel.context, parallel.is_zigzag, plan.node_size(shard_size),
    )  # fmt: skip
    if plan.memory_budget is not None and plan.bucket_bytes is None:
        sizes = [b.full_bytes for b in layout.buckets if not b.persistent]
        bucket_bytes = min(bucket_bytes, max(sizes, default=0))
    made = with_tiers(merge_small(layout, params, bucket_bytes), plan.offload)
    return replace(made, position=position)


def with_tiers(layout: Layout, offload: Offload) -> Layout:
    """Return the layout with each bucket on the tiers that the plan's `offload` assigns.

    Trained parameters are kept where their optimizer runs, with `device_fraction` of them on the
    device: the first buckets, whose gradients come last. Frozen parameters are kept on the tier of
    the parameters.
    """
    trained, frozen = TIER_OF[offload.optimizer], TIER_OF[offload.parameters]
    left = offload.device_fraction * sum(b.numel for b in layout.buckets if b.trainable)
    buckets: dict[int, Bucket] = {}
    for block in layout.blocks:
        numel, is_persistent = sum(b.numel for b in block), block[0].persistent
        home = Tier.DEVICE if is_persistent else frozen
        if block[0].trainable:
            stays = left >= numel
            home = Tier.DEVICE if stays else trained
            left -= numel if stays else 0
        near = Tier.DEVICE if is_persistent else frozen
        source = min(home, near, key=lambda tier: tier.distance)
        buckets |= {b.index: replace(b, home=home, source=source) for b in block}
    return replace(layout, buckets=tuple(buckets[b.index] for b in layout.buckets))


_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """Return the format to capture in; None keeps every parameter in its own format."""
    return None if precision.compute == "fp32" else _FORMATS[precision.compute]


def module_dtypes(precision: Precision) -> Patterns | None:
    """Return the formats of modules that compute in a format of their own, by name pattern."""
    if precision.modules is None:
        return None
    return Patterns({pattern: _FORMATS[name] for pattern, name in precision.modules.items()})


def capture_options(plan: Plan) -> dict[str, Any]:
    """Return the options that a plan sets for capture, as keyword arguments of `zerofx.capture`."""
    return {
        "differentiate": plan.differentiate,
        "outputs": plan.outputs,
        "units": plan.units,
        "compute_dtype": compute_dtype(plan.precision),
        "module_dtypes": module_dtypes(plan.precision),
        "ignored_params": plan.ignored_params,
    }


def with_master(params: Iterable[ParamInfo], precision: Precision) -> list[ParamInfo]:
    """Return the parameters with their storage format: the master format if they are cast."""
    compute, master = compute_dtype(precision), _FORMATS[precision.master]
    modules = module_dtypes(precision) or Patterns({})

    def kept_in(param: ParamInfo) -> torch.dtype:
        own = param.compute_dtype
        if modules.match(param.name) is own:
            return own if own.itemsize > master.itemsize else master
        return master if compute is not None and own is compute else param.dtype

    return [replace(p, dtype=kept_in(p)) for p in params]


def unit_params(params: Iterable[ParamInfo], precision: Precision) -> list[UnitParam]:
    """Return the layout's view of parameters that already have their storage format."""
    has_own = precision.compute == precision.reduce == "fp32" and precision.modules is None
    reduce_dtype = None if has_own else _FORMATS[precision.reduce]
    return [
        UnitParam(
            p.name,
            p.shape,
            p.dtype,
            p.unit,
            p.requires_grad,
            p.compute_dtype,
            reduce_dtype if p.dtype in LOW_OR_SINGLE else None,
            p.tile,
            p.part,
            p.positions,
        )
        for p in params
    ]


@dataclass(frozen=True)
class Span:
    """The contiguous part of a graph that one region occupies: its first and last node."""

    first: fx.Node
    last: fx.Node


def spans(graph: fx.Graph) -> dict[int, Span]:
    """Return the span of each region."""
    return {k: Span(nodes[0], nodes[-1]) for k, nodes in regions(graph).items()}


class Units:
    """Launch positions for reloads in backward: a number of units ahead of a region."""

    def __init__(self, graph: fx.Graph, distance: int) -> None:
        self.spans, self._distance = spans(graph), distance
        self._ordinal: dict[int, int] = {}
        self._begins: list[int] = []  # ordinal of a unit's turn -> its first region
        unit = None
        for region in sorted(self.spans):
            here = info(self.spans[region].first).unit
            if here != unit:
                self._begins.append(region)
            unit, self._ordinal[region] = here, len(self._begins) - 1

    @property
    def earliest(self) -> int:
        return self._begins[0]

    def launch_region(self, region: int) -> int:
        """Return the region before which a value that `region` reads first is launched."""
        if self._distance == 0:
            return region
        return self._begins[max(self._ordinal[region] - self._distance, 0)]


def reading_regions(node: fx.Node) -> set[int]:
    """Return the regions that read a value (regions contain their own views of it)."""
    found = set()
    for user in node.users:
        region = info(user).region
        if region is not None:
            found.add(region)
    return found


def bucket_uses(program: Planned, graph: str) -> dict[int, list[fx.Node]]:
    """Return, for each bucket, the placeholders of `graph` for its parameters."""
    where = program.layout.where
    found: dict[int, list[fx.Node]] = {}
    for node in program.placeholders(graph, Role.PARAM):
        if node.users:
            name = info(node).name
            if name not in where:
                raise ShardError(
                    f"{name} is a parameter that the model did not have when it was compiled. Add "
                    "and remove parameters (remove_weight_norm, a new head) before zerofx.compile."
                )
            bucket, _ = where[name]
            found.setdefault(bucket.index, []).append(node)
    return found
