"""How many bytes a rank holds, from the start of forward to the optimizer's step.

What is counted is one rank's tensors in the steady state of an ordinary loop: the batch and the
results are held by the user until the step ends, gradients were dropped before it (zero_grad), and
slots, resident copies, gradient shards and optimizer states are there from the first step on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx

from zerofx.analysis.liveness import (
    Category,
    Lifetimes,
    lifetimes,
    live_at,
    span_bytes,
)
from zerofx.analysis.scratch import scratch_bytes
from zerofx.ir import ops
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import Program
from zerofx.runtime.layout import Bucket

ADAMW_STATE_BYTES = 8  # an element's two moments in fp32


@dataclass(frozen=True)
class Held:
    """Something that occupies memory: at the peak, or all the time."""

    category: Category
    name: str
    nbytes: int
    module: str = ""
    line: str = ""


    @property
    def is_slot(self) -> bool:
        return self.category is Category.COMMUNICATION and self.name.startswith("slot ")


def slot_name(slot: int) -> str:
    return f"slot {slot}"


@dataclass(frozen=True)
class Memory:
    """One rank's memory over a step.

    static: what is held all the time. curve: total bytes at each of `life`'s times.
    """

    static: tuple[Held, ...]
    curve: tuple[int, ...]
    life: Lifetimes

    @property
    def peak_bytes(self) -> int:
        return max(self.curve, default=self.static_bytes)

    @property
    def static_bytes(self) -> int:
        return sum(h.nbytes for h in self.static)

    @property
    def peak_time(self) -> int:
        return self.curve.index(self.peak_bytes) if self.curve else 0

    def held_at(self, time: int) -> list[Held]:
        """Return everything held at a time, largest first; slots with what lies in them."""
        live = [s for s in live_at(self.life.storages, time) if s.nbytes]
        inside = {slot_name(s.slot): f"{s.category.value} {s.name}" for s in live if s.slot >= 0}
        found = [
            replace(h, name=f"{h.name}: {inside.get(h.name, 'free')}") if h.is_slot else h
            for h in self.static
        ]
        for s in live:
            if s.slot < 0:
                module = s.where.module or s.where.unit
                found.append(Held(s.category, s.name, s.nbytes, module, s.where.line))
        return sorted(found, key=lambda h: (-h.nbytes, h.name))

    def by_category(self, time: int) -> dict[Category, int]:
        """Return the bytes of each category at a time; every category is there."""
        found = dict.fromkeys(Category, 0)
        for held in self.held_at(time):
            found[held.category] += held.nbytes
        return found


def memory(program: Program, optimizer_bytes: int = ADAMW_STATE_BYTES) -> Memory:
    """Walk the program's storages through one step.

    optimizer_bytes: bytes of optimizer state for each element of a trainable parameter.
    """
    life = lifetimes(program)
    static = static_parts(program, life, optimizer_bytes)
    return Memory(static, _curve(life, sum(h.nbytes for h in static)), life)


def peak_bytes(program: Program, optimizer_bytes: int = ADAMW_STATE_BYTES) -> int:
    """Return the high-water mark of one rank over a step."""
    return memory(program, optimizer_bytes).peak_bytes


def _curve(life: Lifetimes, base: int) -> tuple[int, ...]:
    change = [0] * (len(life.nodes) + 1)
    for storage in life.storages:
        if storage.slot < 0:
            change[storage.birth] += storage.nbytes
            change[storage.death + 1] -= storage.nbytes
    change[0] += base
    return tuple(accumulate(change[:-1]))


# -- what is held all the time ----------------------------------------------------------------
def static_parts(program: Program, life: Lifetimes, optimizer_bytes: int) -> tuple[Held, ...]:
    """Return what a rank holds throughout: beyond what the graphs' placeholders show."""
    found = [*_unread_shards(program, life), *_resident(program)]
    found += [*_gradients(program), *_states(program, optimizer_bytes)]
    for slot, nbytes in enumerate(program.slots.get("bytes", [])):
        found.append(Held(Category.COMMUNICATION, slot_name(slot), nbytes))
    received = scratch_bytes(program)
    if received:
        found.append(Held(Category.COMMUNICATION, "receive buffers of reductions", received))
    return tuple(found)


def _shard_bytes(program: Program, bucket: Bucket) -> int:
    assert program.layout is not None
    return program.layout.shard_numel(bucket) * bucket.dtype.itemsize


def _unread_shards(program: Program, life: Lifetimes) -> list[Held]:
    """Return the shards of buckets that this program does not read."""
    if program.layout is None:
        return []
    read = {s.where.index for s in life.storages if s.where.role is Role.SHARD}
    is_sharded = any(s.where.role is Role.SHARD for s in life.storages)
    return [
        Held(Category.PARAMETERS, "shard", _shard_bytes(program, b), b.label())
        for b in program.layout.buckets
        if is_sharded and b.index not in read
    ]


def _resident(program: Program) -> list[Held]:
    """Return the gathered copies that stay from step to step."""
    found: dict[int, Held] = {}
    for node in _nodes(program):
        if node.target is ops.refresh:
            where = info(node)
            size = span_bytes(value(node))
            found[where.index] = Held(Category.GATHERED, "resident copy", size, where.unit)
    return list(found.values())


def _gradients(program: Program) -> list[Held]:
    """Return the reduced gradients, which p.grad shows."""
    return [
        Held(Category.GRADIENTS, "p.grad", span_bytes(value(n)), info(n).unit)
        for n in _nodes(program)
        if n.target in ops.REDUCES
    ]


def _states(program: Program, optimizer_bytes: int) -> list[Held]:
    """Return the optimizer's states, of the elements that a rank owns and trains."""
    if not optimizer_bytes or not program.is_training:
        return []
    numel = {b.label(): n for b, n in _owned(program)}
    if program.layout is None:
        numel = {p.name: _numel(p.shape) for p in program.params.values() if p.requires_grad}
    return [
        Held(Category.OPTIMIZER, "states", n * optimizer_bytes, name)
        for name, n in numel.items()
        if n
    ]


def _owned(program: Program) -> list[tuple[Bucket, int]]:
    """Return how many elements of each bucket's trainable parameters the fullest rank owns."""
    layout = program.layout
    if layout is None:
        return []
    found = []
    for bucket in layout.buckets:
        trained = [p for p in bucket.params if program.params[p.name].requires_grad]
        # Rank 0 owns no padding; where one parameter is the whole slice, all ranks own as much.
        pieces = (layout.piece(bucket, p, 0)[2] for p in trained)
        found.append((bucket, sum(pieces)))
    return found


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _nodes(program: Program) -> list[fx.Node]:
    return [n for gm in program.graphs.values() for n in gm.graph.nodes]

