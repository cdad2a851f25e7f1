"""shard-parameters: replace full parameters by gathers of this rank's shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import add_placeholder, call, erase_unused
from zerofx.ir.meta import Phase, Role, info, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import spec_of
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import bucket_uses, reading_regions, spans


@dataclass(frozen=True)
class ShardParameters(Pass):
    """Gather each bucket before the first region that reads it.

    Stage 3: all-gather in forward and again in backward. A bucket whose uses are more than
    `regather_gap` regions apart (a tied embedding and head) is gathered once per run of uses, if it
    is larger than `regather_bytes`; a tile is gathered for each use.
    Stages 1 and 2, and persistent buckets: the gathered copy is resident and is refreshed after an
    update.
    One rank on the shard axis: the shard is the parameter, unless the layers compute in another
    format or the shard is kept off the device. In that case a device copy in the compute format is
    gathered.
    """

    name: ClassVar[str] = "shard-parameters"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT, Fact.BUCKETS_ASSIGNED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    stage: int = 3
    regather_gap: int = 2
    regather_bytes: int = 64 << 20

    def run(self, program: Planned) -> Report:
        layout = program.layout
        gathers = 0
        for graph in (g for g in (FORWARD, BACKWARD) if g in program.graphs):
            where = spans(program.graph(graph))
            place = {n: i for i, n in enumerate(program.graph(graph).nodes)}
            given = program.placeholders(graph)
            for index, params in sorted(bucket_uses(program, graph).items()):
                bucket = layout.buckets[index]
                shard = _shard_placeholder(program, graph, bucket, given)
                given.append(shard)
                alone = [u for p in params for u in p.users if spec_of(u) is not None]
                for stretch in self._stretches(params, bucket):
                    first = where[min(stretch)].first if stretch else None
                    if alone and (first is None or place[alone[0]] < place[first]):
                        first = min(alone, key=place.__getitem__)
                    self._insert(program, graph, bucket, shard, params, stretch, first)
                    gathers += 1
            for node in program.placeholders(graph, Role.PARAM):
                program.graph(graph).erase_node(node)
        erase_unused(program)
        return Report(gathers > 0, f"{gathers} gathers")

    def _stretches(self, params: list[fx.Node], bucket: Bucket) -> list[set[int]]:
        """Group the regions that read the bucket into runs, each with its own gather."""
        used = sorted(set().union(*(reading_regions(p) for p in params)))
        if not used:
            return [set()]
        groups = [[used[0]]]
        for region in used[1:]:
            gap = region - groups[-1][-1]
            far = gap > self.regather_gap and bucket.full_bytes > self.regather_bytes
            if bucket.tile is not None:  # otherwise several tiles would be gathered at once
                far = gap > 1
            if far and self.stage == 3:
                groups.append([region])
            else:
                groups[-1].append(region)
        return [set(g) for g in groups]

    def _insert(
        self,
        program: Planned,
        name: str,
        bucket: Bucket,
        shard: fx.Node,
        params: list[fx.Node],
        stretch: set[int],
        first: fx.Node | None,
    ) -> None:
        graph = program.graph(name)
        anchor = first or graph.output_node()
        phase = info(anchor).phase
        with graph.inserting_before(anchor):
            full = self._full(graph, name, bucket, shard, program.layout.shard_size)
            for param in params:
                users = [u for u in param.users if not stretch or info(u).region in stretch]
                users += [u for u in param.users if info(u).region is None and u not in users]
                if not users:
                    continue
                piece = program.layout.where[info(param).name][1]
                view = call(graph, ops.param_view, (full, piece.offset, list(piece.shape)))
                set_info(view, phase=phase, name=piece.name, unit=info(param).unit)
                for user in users:
                    user.replace_input_with(param, view)

    def _full(
        self, graph: fx.Graph, name: str, bucket: Bucket, shard: fx.Node, shard_size: int
    ) -> fx.Node:
        if shard_size == 1 and not bucket.is_cast and not bucket.is_away:
            return shard
        fields = {"unit": bucket.label(), "index": bucket.index}
        fields["phase"] = Phase.BACKWARD if name == BACKWARD else Phase.FORWARD
        arguments = (shard, bucket.index, bucket.numel)
        cast = {"dtype": bucket.compute_dtype} if bucket.is_cast else {}
        stays = shard_size == 1 and bucket.is_away and bucket.source is Tier.DEVICE
        if self.stage == 3 and not bucket.persistent and not stays:
            launch = call(graph, ops.all_gather, arguments, named=cast)
        elif name == FORWARD:
            launch = call(graph, ops.refresh, arguments, named=cast)
        else:
            full = call(graph, ops.resident, arguments, named=cast)
            set_info(full, **fields)
            return full
        set_info(launch, **fields)
        full = call(graph, ops.wait, (launch,))
        set_info(full, **fields)
        return full


def _shard_placeholder(
    program: Planned, graph: str, bucket: Bucket, given: Sequence[fx.Node]
) -> fx.Node:
    """Append the placeholder of a bucket's shard after the graph's other placeholders."""
    val = value(given[0]).new_empty(program.layout.shard_numel(bucket), dtype=bucket.dtype)
    return add_placeholder(
        program.graph(graph),
        f"shard_{bucket.index}",
        val,
        Role.SHARD,
        given[-1],
        name=f"shard_{bucket.index}",
        index=bucket.index,
        unit=bucket.label(),
        phase=Phase.BACKWARD if graph == BACKWARD else Phase.FORWARD,
    )
