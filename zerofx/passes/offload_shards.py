"""offload-shards: reload shards that are kept off the device, and offload their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info, set_info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, kind_of, spec_of, wait_for
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class OffloadShards(Pass):
    """Reload the shard of each gather before its launch, and offload each reduced gradient.

    The reload is launched `distance` gathers ahead of its own gather, so that the copy and the
    transfer of one bucket overlap those of others. If one rank owns a whole bucket, the reload
    replaces the gather. A bucket that keeps a copy on the device is refreshed there, which moves
    nothing unless the shard has changed. A reduced slice is offloaded when its reduction has ended.
    It is stored after the launch of the next one, so that one slice is in flight during the
    compute. A shard on NVMe is read into host memory `read_distance` reloads before its own reload.
    """

    name: ClassVar[str] = "offload-shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PREFETCHED, Fact.WAITS_SUNK})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SHARDS_OFFLOADED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED, Fact.UPDATES_PLACED})

    distance: int = 1
    read_distance: int = 1

    def run(self, program: Planned) -> Report:
        layout = program.layout
        if not any(b.is_away for b in layout.buckets):
            return Report(False, "all shards live on the device")
        reloads = sum(self._reload(gm.graph, layout) for gm in program.graphs.values())
        leaving = _offload_gradients(program, layout) if BACKWARD in program.graphs else 0
        return Report(reloads + leaving > 0, f"{reloads} reloads, {leaving} gradients offloaded")

    def _reload(self, graph: fx.Graph, layout: Layout) -> int:
        found = [(n, spec_of(n)) for n in graph.nodes]
        gathers = [n for n, spec in found if spec and spec.is_gather and not spec.stays]
        away = [n for n in gathers if _reads_shard(n) and layout.buckets[info(n).index].is_away]
        if layout.shard_size == 1:
            reloads = [_replace(graph, gather) for gather in away]
        else:
            ahead = {n: gathers[max(k - self.distance, 0)] for k, n in enumerate(gathers)}
            reloads = [_insert(graph, gather, ahead[gather], layout) for gather in away]
        for k, reload in enumerate(reloads):
            if layout.buckets[info(reload).index].source is Tier.NVME:
                _read(graph, reload, reloads[max(k - self.read_distance, 0)])
        return len(away)


def _reads_shard(gather: fx.Node) -> bool:
    """Return whether a gather sends this rank's shard, and not a secondary shard."""
    return info(gather.all_input_nodes[0]).role is Role.SHARD


def _replace(graph: fx.Graph, gather: fx.Node) -> fx.Node:
    """Replace a gather among a single rank by a reload."""
    with graph.inserting_before(gather):
        launch = call(graph, ops.reload_shard, gather.args[:3], named=dict(gather.kwargs))
    launch.meta["zfx"] = info(gather)
    gather.replace_all_uses_with(launch)
    graph.erase_node(gather)
    return launch


def _insert(graph: fx.Graph, gather: fx.Node, before: fx.Node, layout: Layout) -> fx.Node:
    """Insert a reload before another gather's launch, and make this gather send its result."""
    bucket = layout.buckets[info(gather).index]
    shard = gather.all_input_nodes[0]
    arguments = (shard, bucket.index, layout.shard_numel(bucket))
    cast = {"dtype": bucket.compute_dtype} if bucket.is_cast else {}
    stays = bucket.source is Tier.DEVICE
    verb = ops.refresh_shard if stays else ops.reload_shard
    with graph.inserting_before(before):
        launch = call(graph, verb, arguments, named=cast)
    with graph.inserting_before(gather):
        held = call(graph, ops.wait, (launch,))
    _describe([launch, held], gather)
    gather.replace_input_with(shard, held)
    if not stays:
        gathered = wait_for(gather)
        with graph.inserting_after(gathered):
            _describe([call(graph, ops.release, (held,))], gather)
    return launch


def _read(graph: fx.Graph, reload: fx.Node, before: fx.Node) -> None:
    """Insert a shard's read from NVMe before another reload; its own reload uses the result."""
    shard = reload.all_input_nodes[0]
    with graph.inserting_before(before):
        launch = call(graph, ops.read_shard, (shard, info(reload).index, value(shard).numel()))
    with graph.inserting_before(reload):
        arrived = call(graph, ops.wait, (launch,))
    _describe([launch, arrived], reload)
    reload.replace_input_with(shard, arrived)


def _offload_gradients(program: Planned, layout: Layout) -> int:
    """Offload the reduced slices of buckets that are kept off the device, one at a time."""
    graph = program.graph(BACKWARD)
    stored = [n for n in graph.nodes if kind_of(n) is Kind.STORE and _bucket(n, layout).is_away]
    launches = []
    for store in stored:
        reduced = store.all_input_nodes[0]
        with graph.inserting_after(reduced):
            launches.append(call(graph, ops.offload_grad, (reduced, info(store).index)))
        with graph.inserting_after(launches[-1]):
            arrived = call(graph, ops.wait, (launches[-1],))
        _describe([launches[-1], arrived], store)
        store.replace_input_with(reduced, arrived)
    for k, store in enumerate(stored):
        later = launches[k + 1] if k + 1 < len(launches) else graph.output_node()
        later.prepend(store.all_input_nodes[0])
        later.prepend(store)
    return len(stored)


def _bucket(node: fx.Node, layout: Layout) -> Bucket:
    return layout.buckets[info(node).index]


def _describe(nodes: Sequence[fx.Node], like: fx.Node) -> None:
    where = info(like)
    for node in nodes:
        set_info(node, phase=where.phase, unit=where.unit, index=where.index)
