"""shard-gradients: reduce every bucket's gradient once, after its last contribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import ClassVar

import torch
from torch import fx

from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.ir.graphs import (
    add_placeholder,
    call,
    is_alias,
    pause_of,
    root_producer,
    set_results,
)
from zerofx.ir.meta import OutputInfo, Phase, Role, info, set_info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, kind_of
from zerofx.layout.buckets import Bucket, Layout
from zerofx.ops.gradients import looked_up
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import Span, spans
from zerofx.policy import reduction

_REDUCE = {"reduce_scatter": ops.reduce_scatter, "all_reduce": ops.all_reduce}
_REDUCE_ROWS = {"reduce_scatter": ops.reduce_scatter_rows, "all_reduce": ops.all_reduce_rows}


@dataclass(frozen=True)
class ShardGradients(Pass):
    """Pack gradients into their bucket as regions finish, reduce, and store the rank's slice.

    The declared scale is 1 / world size: gradients are the mean over ranks. The first gradients of
    a bucket wait for later ones if that lowers the peak: its buffer then exists for a shorter time,
    and more saved activations are freed before it.

    by_rows: if a bucket consists of one table that is only used by lookups, its reduction also
        receives the indices of the rows that have gradients. The number of distinct rows is known
        at launch. All ranks then choose the cheaper transfer: these rows or the whole table.
    """

    name: ClassVar[str] = "shard-gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT, Fact.PARAMS_SHARDED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    world_size: int = 1
    by_rows: bool = False

    def run(self, program: Planned) -> Report:
        if BACKWARD not in program.graphs:
            return Report(False, "inference: no gradients")
        by_bucket: dict[int, list[tuple[str, fx.Node]]] = {}
        others: list[tuple[OutputInfo, object]] = []
        for spec, node in zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True):
            if spec.role is Role.GRAD and isinstance(node, fx.Node):
                index = program.layout.where[spec.name][0].index
                by_bucket.setdefault(index, []).append((spec.name, node))
            elif spec.role is not Role.GRAD:
                others.append((spec, node))
        graph = program.graph(BACKWARD)
        where, pause = spans(graph), pause_of(graph)
        shards = {info(n).index: n for n in program.placeholders(BACKWARD, Role.SHARD)}
        place = {n: i for i, n in enumerate(graph.nodes)}
        groups: dict[int, list[tuple[fx.Node, list[tuple[str, fx.Node]]]]] = {}
        for index, grads in by_bucket.items():
            by_end: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
            for name, grad in grads:
                by_end.setdefault(_end(grad, where), []).append((name, grad))
            ends = sorted(by_end, key=place.__getitem__)
            early = [end for end in ends if pause is not None and place[end] < place[pause]]
            if pause is not None and early:  # they go with the next ones, before which no buffer is
                first = ends[len(early)] if len(ends) > len(early) else pause
                by_end[first] = [g for e in (*early, first) for g in by_end.pop(e, [])]
                ends = [first, *ends[len(early) + 1 :]]
            groups[index] = [(end, by_end[end]) for end in ends]
        _open_later(program, groups)
        stored = []
        for index in sorted(groups, key=lambda b: place[groups[b][-1][0]]):
            bucket = program.layout.buckets[index]
            shard = shards.get(index) or _shard(program, bucket)
            node = self._reduce(program, graph, bucket, shard, groups[index])
            stored.append((OutputInfo(Role.SHARD_GRAD, bucket.label(), index), node))
        program.outputs[BACKWARD] = tuple(s for s, _ in others + stored)
        set_results(graph, [n for _, n in others + stored])
        return Report(bool(stored), f"{len(stored)} reductions, scale 1/{self.world_size}")

    def _reduce(
        self,
        program: Planned,
        graph: fx.Graph,
        bucket: Bucket,
        shard: fx.Node,
        groups: list[tuple[fx.Node, list[tuple[str, fx.Node]]]],
    ) -> fx.Node:
        """Insert the nodes of a bucket.

        groups: its gradients by the node after which they are made, in order.
        """
        layout = program.layout
        grads = [grad for _, group in groups for grad in group]
        fields = {"phase": Phase.BACKWARD, "unit": bucket.label(), "index": bucket.index}
        covered = len(grads) == len(bucket.params)
        packed: fx.Node | None = None
        for end, group in groups:
            anchor = _body(graph) if end.op == "placeholder" else end.next
            offsets = [layout.where[n][1].offset for n, _ in group]
            with graph.inserting_before(anchor):
                if packed is None:
                    arguments = (shard, bucket.index, bucket.numel, not covered)
                    packed = call(
                        graph, ops.grad_buffer, arguments, named=_cast(bucket, bucket.reduce_dtype)
                    )
                    set_info(packed, **fields)
                packed = call(graph, ops.pack, (packed, [n for _, n in group], offsets))
                set_info(packed, **fields)
        assert packed is not None
        kind = reduction.kind_over(reduction.first_axis(layout.mesh))
        indices = self._looked_up(layout, bucket, grads)
        with graph.inserting_after(packed):
            given = packed, bucket.index, layout.shard_numel(bucket), 1.0 / self.world_size
            if indices:
                launch = call(graph, _REDUCE_ROWS[kind], (*given, indices))
            else:
                launch = call(graph, _REDUCE[kind], given)
        with graph.inserting_after(launch):
            done = call(graph, ops.wait, (launch,))
        with graph.inserting_after(done):
            result = call(
                graph, ops.store_grad, (done, bucket.index), named=_cast(bucket, bucket.dtype)
            )
        for node in (launch, done, result):
            set_info(node, **fields)
        return result

    def _looked_up(
        self, layout: Layout, bucket: Bucket, grads: list[tuple[str, fx.Node]]
    ) -> list[fx.Node]:
        """Return the indices of a gradient's rows, or [] if the bucket is reduced whole."""
        is_table = len(bucket.params) == 1 and len(bucket.params[0].shape) == 2
        is_whole = (
            bucket.is_away or bucket.tile is not None or len(reduction.legs(layout.mesh)) != 1
        )
        return looked_up(grads[0][1]) if self.by_rows and is_table and not is_whole else []


Groups = list[tuple[fx.Node, list[tuple[str, fx.Node]]]]


def _open_later(program: Planned, groups: dict[int, Groups]) -> None:
    """Let the first gradients of each bucket be packed with later ones if that lowers the peak."""
    if all(len(of_bucket) == 1 for of_bucket in groups.values()):
        return
    found = memory(program, accumulation=1, no_sync=False)
    curve, times = list(found.curve), {node: t for t, (_, node) in enumerate(found.life.nodes)}
    made: dict[str, Storage] = {}
    for storage in found.life.storages:
        if storage.category is Category.GRADIENTS and storage.name in program.params:
            made[storage.name] = storage
            for time in range(storage.birth, storage.death + 1):
                curve[time] -= storage.nbytes
    for index, of_bucket in groups.items():
        bucket = program.layout.buckets[index]
        size = bucket.numel * bucket.reduce_dtype.itemsize
        ends = [times[end] for end, _ in of_bucket]
        parts = [[made[n] for n, _ in group if n in made] for _, group in of_bucket]
        peaks = [_peak_bytes(curve, size, ends, parts, first) for first in range(len(ends))]
        first = peaks.index(min(peaks))
        together = [grad for _, group in of_bucket[: first + 1] for grad in group]
        of_bucket[: first + 1] = [(of_bucket[first][0], together)]


def _peak_bytes(
    curve: Sequence[int],
    size: int,
    ends: Sequence[int],
    parts: Sequence[Sequence[Storage]],
    first: int,
) -> int:
    """Return the peak if a bucket's groups up to the one numbered `first` are packed together.

    curve: the bytes at each time without gradients. size: of the buffer. ends: the times at which
    groups are made. parts: the gradients in each.
    """
    change = [0] * (len(curve) + 1)
    for number, storages in enumerate(parts):
        packed = ends[max(number, first)]
        for storage in storages:
            change[storage.birth] += storage.nbytes
            change[max(packed, storage.birth) + 1] -= storage.nbytes
    change[ends[first]] += size
    return max(map(add, curve, accumulate(change)))


def _cast(bucket: Bucket, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype argument if gradients are reduced in another format than the shards'."""
    return {} if bucket.reduce_dtype is bucket.dtype else {"dtype": dtype}


def _end(node: fx.Node, where: dict[int, Span]) -> fx.Node:
    """Return the node after which a gradient is available: its region's last, or itself."""
    source = root_producer(node)
    if source.op == "placeholder":
        return _body(source.graph).prev
    region = info(source).region
    if region is not None:
        return where[region].last
    if is_alias(source) and kind_of(source.all_input_nodes[0]) is Kind.WAIT:  # one part of several
        return max(source.all_input_nodes[0].users)
    return source


def _body(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op != "placeholder")


def _shard(program: Planned, bucket: Bucket) -> fx.Node:
    """Create the shard placeholder of a bucket whose parameters backward does not read."""
    like = value(program.placeholders(BACKWARD)[0])
    return add_placeholder(
        program.graph(BACKWARD),
        f"shard_{bucket.index}",
        like.new_empty(program.layout.shard_numel(bucket), dtype=bucket.dtype),
        Role.SHARD,
        name=f"shard_{bucket.index}",
        index=bucket.index,
        unit=bucket.label(),
        phase=Phase.BACKWARD,
    )
