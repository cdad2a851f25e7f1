"""Memory of a rank outside of graphs: shards, gradients, states, slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import fx

from zerofx.analysis.memory.host_places import update_staging
from zerofx.analysis.memory.micro import Before, Micro, batches_per_call
from zerofx.analysis.memory.scratch import lent_buffers
from zerofx.analysis.memory.storage import (
    CATEGORY_OF,
    Category,
    Lifetimes,
    Storage,
    forward_slots,
    sent_as,
    span_bytes,
)
from zerofx.ir.graphs import alias_source, is_in_place, pause_of
from zerofx.ir.meta import Info, OutputInfo, Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import (
    Kind,
    gradients_of,
    kind_of,
    slot_of,
    spec_of,
    takes_slot,
)
from zerofx.layout.buckets import Bucket, Layout
from zerofx.policy import reduction, resting, schedules
from zerofx.policy.schedules import Action, Hop, Moment
from zerofx.policy.shard_copies import SentAs


def standing(
    program: Planned, life: Lifetimes, optimizer_bytes: int, micro: Micro
) -> list[Storage]:
    """Return the storages outside of graphs in a steady-state micro-batch, with their times."""
    found = [*_unread_shards(program, life), *_resident(life)]
    found += [*_gradients(program, life, micro), *_sums(program, life, micro)]
    found += [*_states(program, life, optimizer_bytes), *_slots(program, life)]
    found += [*_casts(program, life), *update_staging(program, life, optimizer_bytes)]
    found += _under_way(program, life, micro)
    return found + lent_buffers(program, life, micro)


def _under_way(program: Planned, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return what a rank of a pipeline holds for other micro-batches, and what travels meanwhile.

    Of a micro-batch under way there is what its forward has saved; or what the second part of its
    backward reads, if it waits for that. Of the rank's other stages, gradients and sums are there
    too. Each half is counted at the moment of the schedule at which most of this is there, among
    those at which gradients of this stage are as `micro` has them.
    """
    stage = program.stage
    if stage.size == 1 or BACKWARD not in program.graphs:
        return []
    parallel = program.plan.parallel
    turn, rank = divmod(stage.position, parallel.pipeline)
    num = batches_per_call(program)
    order = schedules.actions(parallel.schedule, parallel.pipeline, rank, num, parallel.interleave)
    sizes, waiting = [0] * parallel.interleave, [0] * parallel.interleave
    sizes[turn], waiting[turn] = saved_bytes(program), waiting_bytes(program)
    saved = stage.saved_bytes or sizes
    others, moved = _OtherStages(program, life, num), _moved_bytes(program, order)
    times, end = _times_of(order, life), schedules.halves(order)[-1]
    most: dict[str, list[Storage]] = {}
    for moment, moved_bytes in zip(schedules.moments(order), moved, strict=True):
        half = moment.action.graph
        if moment.action.turn != turn or not _is_alike(moment, micro, half == end, others.puts_off):
            continue
        held = sum(a * saved[t] + b * waiting[t] for t, (a, b) in moment.others.items())
        count = sum(sum(each) for each in moment.others.values())
        name = f"saved by {count} other micro-batch" + "es" * (count != 1)
        if parallel.interleave > 1:
            name = "saved by other micro-batches and stages"
        between = "between pipeline stages"
        found = [
            Storage(Category.ACTIVATIONS, held, name, *times[half], Info()),
            Storage(Category.COMMUNICATION, moved_bytes, between, *times[half], Info()),
            *others.gradients(moment.ended, times[half]),
        ]
        most[half] = max(most.get(half, []), found, key=_size)
    return [
        *(storage for found in most.values() for storage in found),
        *others.resident(),
        *_of_earlier_calls(program, life, micro),
        *_of_ignored(program, life, micro),
        *_results_of_all(program, life),
    ]


def _moved_bytes(program: Planned, order: Sequence[Action]) -> list[int]:
    """Return the bytes of values on their way between ranks during each action.

    What the next action reads is already being received. What was sent is held until so many later
    values of the same hop are sent (`Hop.ahead`).
    """
    stage, size = program.stage, program.plan.parallel.pipeline
    rank = stage.position % size
    wires = [w for w in stage.wires if (w.source - w.target) % size]
    sent: dict[Hop, int] = {}
    found = []
    for action, after in zip(order, [*order[1:], None], strict=True):
        held = 0
        for wire in wires:
            hop = Hop(wire.graph, wire.source, wire.target, wire.name)
            held += min(sent.get(hop, 0), hop.ahead) * nbytes(wire.value)
            if after and (wire.graph, wire.target) == (after.reads, after.turn * size + rank):
                held += nbytes(wire.value)
            if (wire.graph, wire.source) == (action.reads, action.turn * size + rank):
                sent[hop] = sent.get(hop, 0) + 1
        found.append(held)
    return found


def _is_alike(moment: Moment, micro: Micro, ends: bool, puts_off: bool) -> bool:
    """Return whether this stage has gradients at a moment as it has beside a micro-batch.

    ends: the half that runs makes gradients of weights. puts_off: the last one reduces their sum.
    """
    has_some = moment.ended.get(moment.action.turn, 0) > 0
    if has_some != (micro.before is not Before.NOTHING):
        return False
    return not ends or micro.reduces == (moment.is_last or not puts_off)


def _size(storages: Sequence[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _of_earlier_calls(program: Planned, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return p.grad of earlier calls of the step, which the end of this call adds to."""
    if not micro.has_earlier_calls:
        return []
    layout = program.layout
    buckets = [b for b in layout.own_buckets if b.trainable and not b.is_away]
    size = sum(layout.shard_numel(b) * b.dtype.itemsize for b in buckets)
    return [_always(Category.GRADIENTS, size, "p.grad of earlier calls", "", life)]


def _of_ignored(program: Planned, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return the gradients of ignored parameters: summed where they are made, then on all ranks."""
    made = [nbytes(wire.value) for wire in program.stage.handed]
    found = [
        nbytes(wire.value) for wire in program.stage.handed if wire.source == program.stage.position
    ]
    sizes = {"p.grad of ignored parameters": sum(made) * micro.has_earlier_calls}
    sizes["sum for ignored parameters"] = sum(found) * (micro.before is not Before.NOTHING)
    return [
        _always(Category.GRADIENTS, size, name, "", life) for name, size in sizes.items() if size
    ]


class _OtherStages:
    """What the rank's other stages of a pipeline hold while this one runs.

    num: micro-batches of a call. puts_off: they sum whole gradients until their last backward.
    """

    def __init__(self, program: Planned, life: Lifetimes, num: int) -> None:
        self.program, self.life, self.num = program, life, num
        self.puts_off = reduction.is_put_off(program.layout, program.plan)
        self._blocks = list(self._not_reduced())

    def _not_reduced(self) -> Iterator[tuple[list[Bucket], set[int]]]:
        """Yield the buckets of each block that this program does not reduce, with their turns."""
        program, parallel = self.program, self.program.plan.parallel
        if parallel.interleave == 1:
            return
        rank = program.stage.position % parallel.pipeline
        reduced = {info(n).index for _, n, spec in self.life.ops if spec.kind is Kind.STORE}
        for block in program.layout.blocks:
            buckets = [
                b for b in block
                if program.layout.has(b) and b.trainable and b.index not in reduced
            ]  # fmt: skip
            stages = {at for b in buckets for n in b.names for at in program.params[n].positions}
            turns = {at // parallel.pipeline for at in stages if at % parallel.pipeline == rank}
            if buckets:
                yield buckets, turns

    def gradients(self, ended: Mapping[int, int], times: tuple[int, int]) -> list[Storage]:
        """Return their gradients when so many backwards of each turn have ended."""
        layout, found = self.program.layout, []
        for buckets, turns in self._blocks:
            done = [ended.get(turn, 0) for turn in turns]
            is_begun, is_done = any(done), all(each == self.num for each in done)
            is_summed = self.puts_off and is_begun and not is_done
            is_apart = reduction.sums_lie_apart(layout)
            is_handed = reduction.hands_over(layout, self.program.plan, buckets[0])
            rests = is_handed or resting.frees_gradient(layout, buckets[0], in_backward=False)
            where = Info(unit=buckets[0].label())
            if not rests or is_done or (is_begun and not (is_summed and is_apart)):
                size = sum(layout.shard_numel(b) * b.dtype.itemsize for b in buckets)
                found.append(Storage(Category.GRADIENTS, size, "p.grad", *times, where))
            if is_summed and is_apart:
                numel, dtype = reduction.sum_form(buckets)
                size = numel * dtype.itemsize
                found.append(Storage(Category.GRADIENTS, size, "sum of no_sync", *times, where))
        return found

    def resident(self) -> list[Storage]:
        """Return the copies that they keep gathered between steps."""
        layout, own = self.program.layout, resident_bytes(self.life.nodes)
        return [
            _always(
                Category.GATHERED, size, "resident copy", layout.buckets[i].label(), self.life
            )
            for i, size in self.program.stage.resident_bytes.items()
            if i not in own
        ]  # fmt: skip


def _results_of_all(program: Planned, life: Lifetimes) -> list[Storage]:
    """Return what the caller of a pipeline is given to compute the loss from, and its gradients.

    Every rank has the results of all micro-batches. The stage that makes them fills them in as they
    come, and in backward reads parts of their gradients.
    """
    if not program.joins_results:
        return []
    stage, num = program.stage, batches_per_call(program)
    begin = next(t for t, (graph, _) in enumerate(life.nodes) if graph == BACKWARD)
    found = []
    for wire in stage.results:
        size = num * nbytes(wire.value)
        is_mine = wire.source == stage.position
        birth = 0 if is_mine else begin
        name = f"{wire.name} of all micro-batches"
        found.append(Storage(Category.OUTPUTS, size, name, birth, life.end, Info()))
        if wire.output not in program.calling.detached:
            found.append(
                Storage(Category.GRADIENTS, size, f"gradient of {name}", begin, life.end, Info())
            )
    return found


def saved_bytes(program: Planned) -> int:
    """Return what a stage's forward saves of a micro-batch, but for what is there anyway."""
    roots: dict[fx.Node, int] = {}
    for spec, result in _results(program, FORWARD):
        if spec.role is Role.SAVED and isinstance(result, fx.Node):
            root = alias_source(result)
            if info(root).role is not Role.PARAM and not _is_held_anyway(root):
                roots[root] = nbytes(value(root))
    return sum(roots.values())


def _times_of(order: Sequence[Action], life: Lifetimes) -> dict[str, tuple[int, int]]:
    """Return the first and the last time of each half that an order runs."""
    nodes = life.nodes
    begins = [0, next(t for t, (graph, _) in enumerate(nodes) if graph == BACKWARD)]
    found = schedules.halves(order)
    if len(found) > len(begins):  # without a pause yet, the second part is empty
        paused = (time for time, _, spec in life.ops if spec.kind is Kind.PAUSE)
        begins.append(next(paused, life.end) + 1)
    ends = [*(begin - 1 for begin in begins[1:]), life.end]
    return dict(zip(found, zip(begins, ends, strict=True), strict=True))


def waiting_bytes(program: Planned) -> int:
    """Return what a backward holds while it waits at its pause, but for what is there anyway."""
    graph = program.graph(BACKWARD)
    pause = pause_of(graph)
    if pause is None:
        return 0
    handed = {r for s, r in _results(program, BACKWARD) if s.role is Role.INPUT_GRAD}
    saved = {s.index: r for s, r in _results(program, FORWARD) if s.role is Role.SAVED}
    nodes = list(graph.nodes)
    at = nodes.index(pause)
    before, roots = set(nodes[:at]), dict[fx.Node, int]()
    for node in nodes[at + 1 :]:
        for read in node.all_input_nodes:
            if read not in before or (node.op == "output" and read in handed):
                continue
            root = alias_source(read)
            if info(root).role is Role.SAVED:
                root = alias_source(saved[info(root).index])
            if info(root).role not in (Role.SHARD, Role.PARAM) and not _is_held_anyway(root):
                roots[root] = nbytes(value(root))
    return sum(roots.values())


def _results(program: Planned, graph: str) -> Iterator[tuple[OutputInfo, Any]]:
    return zip(program.outputs[graph], program.results(graph), strict=True)


def _is_held_anyway(root: fx.Node) -> bool:
    """Return whether a saved value is an input or a buffer, and not another stage's value."""
    return info(root).role in (Role.INPUT, Role.BUFFER) and not info(root).digest


def with_other_stages(programs: Sequence[Planned]) -> None:
    """Let each stage of one rank know what all save, keep and send, which its memory counts."""
    if len(programs) > 1 and all(BACKWARD in program.graphs for program in programs):
        sizes = tuple(map(saved_bytes, programs))
        nodes = [(graph, n) for p in programs for graph in p.graphs for n in p.graph(graph).nodes]
        kept = resident_bytes(nodes)
        wires = tuple(dict.fromkeys(wire for p in programs for wire in p.stage.wires))
        for program in programs:
            program.stage = replace(
                program.stage, saved_bytes=sizes, resident_bytes=kept, wires=wires
            )


def _always(category: Category, nbytes: int, name: str, unit: str, life: Lifetimes) -> Storage:
    return Storage(category, nbytes, name, 0, life.end, Info(unit=unit))


def _unread_shards(program: Planned, life: Lifetimes) -> list[Storage]:
    """Return the shards of buckets that this program does not read."""
    layout = program.layout
    read = {s.where.index for s in life.storages if s.where.role is Role.SHARD}
    if not read:  # parameters are not sharded yet
        return []
    return [
        _always(
            _where(b, Category.PARAMETERS),
            layout.shard_numel(b) * b.dtype.itemsize,
            "shard",
            b.label(),
            life,
        )
        for b in layout.buckets
        if b.index not in read
    ]


def _resident(life: Lifetimes) -> list[Storage]:
    """Return the gathered copies that persist from step to step."""
    return [
        _always(Category.GATHERED, span_bytes(value(n)), "resident copy", info(n).unit, life)
        for n in _refreshed(life.nodes).values()
    ]


def _refreshed(nodes: Iterable[tuple[str, fx.Node]]) -> dict[int, fx.Node]:
    """Return bucket -> the launch that brings its resident copy up to date."""
    launches = [(n, spec_of(n)) for _, n in nodes if kind_of(n) is Kind.LAUNCH]
    return {info(n).index: n for n, spec in launches if spec is not None and spec.stays}


def resident_bytes(nodes: Iterable[tuple[str, fx.Node]]) -> dict[int, int]:
    """Return bucket -> bytes of the copy that nodes keep gathered from step to step."""
    return {bucket: span_bytes(value(n)) for bucket, n in _refreshed(nodes).items()}


def _casts(program: Planned, life: Lifetimes) -> list[Storage]:
    """Return the copies in the compute format that are kept on the host next to their shards."""
    layout = program.layout
    sent = life.times_of(lambda spec: spec.is_reload or (spec.is_gather and spec.stays))
    return [
        _always(
            Category.HOST, layout.shard_numel(b) * b.compute_dtype.itemsize, "cast copy",
            b.label(), life,
        )
        for b in layout.buckets
        if b.is_away and b.index in sent and sent_as(program, b) is SentAs.COPY
    ]  # fmt: skip


def _where(bucket: Bucket, category: Category) -> Category:
    """Return the category of a bucket's memory: a separate one if the bucket is off the device."""
    return CATEGORY_OF.get(bucket.home, category)


def _gradients(program: Planned, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return the reduced gradients, from the reduction to their update, or to zero_grad.

    Gradients of earlier micro-batches, to which this one adds, exist from the beginning.
    """
    found: list[Storage] = []
    layout = program.layout
    stands = micro.before is Before.REDUCED or (
        micro.before is Before.SUMS and not reduction.sums_lie_apart(layout)
    )
    updated = life.times_of(lambda spec: spec.kind is Kind.UPDATE)
    begun: dict[str, int] = {}  # tiled parameter -> time of its first gradient
    packed: dict[int, int] = {}  # bucket -> time of the first gradient in p.grad's memory
    for time, node, spec in life.ops:
        if is_in_place(node, layout) and not micro.packs_apart:
            packed[info(node).index] = time
        if stands and spec.is_handing_over:
            size = sum(nbytes(value(grad)) for grad, _ in gradients_of(node))
            found.append(_always(Category.GRADIENTS, size, "p.grad", info(node).unit, life))
        if not spec.is_reduction:
            continue
        bucket = layout.buckets[info(node).index]
        size = layout.shard_numel(bucket) * bucket.dtype.itemsize
        birth, death = 0, life.end
        if bucket.is_away:
            found.append(_away_gradient(layout, bucket, info(node), updated, time, life))
            continue
        rests = resting.frees_gradient(layout, bucket, bucket.index in updated)
        if rests and not micro.reduces and reduction.sums_lie_apart(layout):
            continue
        if rests and not stands:
            birth = packed.get(bucket.index, time)
            death = updated.get(bucket.index, life.end)
        if bucket.tile is not None and birth:  # one allocation for all tiles
            birth = begun.setdefault(bucket.tile.name, birth)
        found.append(Storage(Category.GRADIENTS, size, "p.grad", birth, death, info(node)))
    return found


def _sums(program: Planned, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return whole gradients summed by no_sync: from the first backward to the last reduction.

    The tiles of a parameter share a sum.
    """
    layout = program.layout
    is_summed = micro.before is Before.SUMS or not micro.reduces
    if not reduction.sums_lie_apart(layout) or not is_summed:
        return []
    times: dict[int, list[int]] = {}  # block -> times at which its buckets' gradients are whole
    where: dict[int, Info] = {}
    for time, node, spec in life.ops:
        if spec.is_reduction:
            block = layout.block_of[info(node).index]
            times.setdefault(block, []).append(time)
            where[block] = info(node)
    found = []
    for block, reduced in times.items():
        buckets = layout.blocks[block]
        numel, dtype = reduction.sum_form(buckets)
        size = numel * dtype.itemsize
        birth = 0 if micro.before is Before.SUMS else reduced[0]
        death = reduced[-1] if micro.reduces else life.end
        name = "sum of no_sync"
        found.append(Storage(Category.GRADIENTS, size, name, birth, death, where[block]))
    return found


def _away_gradient(
    layout: Layout, bucket: Bucket, where: Info, updated: dict[int, int], time: int, life: Lifetimes
) -> Storage:
    """Return the storage of a gradient off the device: permanent, or until its update."""
    in_backward = bucket.index in updated
    category = CATEGORY_OF[reduction.gradient_tier(bucket, in_backward)]
    size = layout.shard_numel(bucket) * bucket.dtype.itemsize
    birth, death = 0, life.end
    if in_backward and resting.frees_gradient(layout, bucket, in_backward):
        birth, death = time, updated[bucket.index]
    return Storage(category, size, "p.grad", birth, death, where)


def _states(program: Planned, life: Lifetimes, optimizer_bytes: int) -> list[Storage]:
    """Return the optimizer's states of the elements that a rank owns and trains."""
    if not optimizer_bytes or not program.is_training:
        return []
    layout, params = program.layout, program.params
    kind = Category.OPTIMIZER
    if not program.is_laid_out:
        numel = [(p.name, math.prod(p.shape), kind) for p in params.values() if p.requires_grad]
    else:  # rank 0 owns no padding; several buckets may share a unit's label
        trained = {
            b: [p for p in b.params if params[p.name].requires_grad] for b in layout.own_buckets
        }
        numel = [
            (b.label(), sum(layout.piece(b, p, 0)[2] for p in ps), _where(b, kind))
            for b, ps in trained.items()
        ]
    return [
        _always(category, n * optimizer_bytes, "states", name, life)
        for name, n, category in numel
        if n
    ]


def _slots(program: Planned, life: Lifetimes) -> list[Storage]:
    """Return the slots: those that forward uses and small ones exist at all times, unlike others.

    A slot is as large as the largest need of the model's programs.
    """
    uses: dict[int, list[int]] = {}
    freed: dict[int, int] = {}  # slot -> the time from which it is not used any more
    for time, node, spec in life.ops:
        if takes_slot(node):
            uses.setdefault(slot_of(node), []).append(time)
            freed.pop(slot_of(node), None)
        elif spec.kind is Kind.FREE:
            freed[slot_of(node)] = time
    paused = next((time for time, _, spec in life.ops if spec.kind is Kind.PAUSE), -1)
    found = []
    layout, stay = program.layout, program.pool.stay | forward_slots(program)
    pairs = zip_longest(program.slot_bytes, program.pool.sizes, fillvalue=0)
    for slot, size in enumerate(map(max, pairs)):
        times = [(0, life.end)]
        if resting.frees_slot(layout, slot, size, stay):
            # it is freed at the pause and at the end; with no use, only another program uses it,
            # which is not running
            used = uses.get(slot, [])
            before, after = [t for t in used if t < paused], [t for t in used if t >= paused]
            parts = (before, paused), (after, life.end)
            last = freed.get(slot, life.end)
            times = [(part[0], min(end, last)) for part, end in parts if part]
        found += [
            Storage(Category.COMMUNICATION, size, slot_name(slot), birth, death, Info())
            for birth, death in times
        ]
    return found


def slot_name(slot: int) -> str:
    return f"slot {slot}"


def is_slot(storage: Storage) -> bool:
    return storage.category is Category.COMMUNICATION and storage.name.startswith("slot ")
