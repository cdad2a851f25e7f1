"""What reductions are lent: buffers to receive into, kept for later ones, freed at the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from zerofx.analysis.micro import Before, Micro
from zerofx.analysis.storage import Category, Lifetimes, Storage
from zerofx.ir.meta import Info, info, nbytes, value
from zerofx.ir.program import Program
from zerofx.ir.spec import Kind, is_reduction, kind_of, launch_of
from zerofx.machine import Machine, preset


@dataclass(eq=False)
class _Buffer:
    numel: int
    dtype: torch.dtype
    birth: int
    death: int
    bucket: str = ""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class _Pool:
    """Buffers of one kind, lent as runtime/collectives.py's Scratch lends them."""

    name: str
    end: int
    rest_bytes: int
    free: list[_Buffer] = field(default_factory=list)
    made: list[_Buffer] = field(default_factory=list)

    def take(self, numel: int, dtype: torch.dtype, time: int, bucket: str) -> _Buffer:
        free = [b for b in self.free if b.dtype is dtype]
        fitting = [b for b in free if b.numel >= numel]
        if fitting:
            found = min(fitting, key=lambda b: b.numel)
            self.free.remove(found)
            return found
        if free:  # a larger one takes a smaller one's place
            gone = max(free, key=lambda b: b.numel)
            self.free.remove(gone)
            gone.death = time - 1
        made = _Buffer(numel, dtype, time, self.end, bucket)
        self.made.append(made)
        return made

    def rest(self) -> None:
        """End a step: large buffers are freed, small ones are there when the next one begins."""
        self.free = [b for b in self.free if b.nbytes < self.rest_bytes]
        self.made = list(self.free)
        for buffer in self.free:
            buffer.birth = 0


def lent_buffers(program: Program, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return what reductions are lent in a micro-batch of the steady state.

    Each arrives in buffers of gloo's axes (NCCL receives into buffers of its own, which are not
    counted). Where it cannot end in p.grad itself, to which it is added or which has another
    format, it ends in a slice of its own.
    """
    if program.layout is None:
        return []
    walk = _Walk(program, life)
    for step in (replace(micro, reduces=True), micro):  # the first leaves what the second finds
        walk.run(step)
    return walk.storages()


class _Walk:
    """Runs through backwards, lending as the runtime lends."""

    def __init__(self, program: Program, life: Lifetimes) -> None:
        assert program.layout is not None
        self.life, self.layout = life, program.layout
        self.machine = program.machine or preset("cpu-gloo")
        rest_bytes = self.layout.rest_bytes
        self.shard, self.replicate, self.slices = (
            _Pool(name, life.end, rest_bytes)
            for name in ("receive buffer", "receive buffer", "reduced slice")
        )

    def storages(self) -> list[Storage]:
        return [
            Storage(Category.COMMUNICATION, b.nbytes, p.name, b.birth, b.death, Info(unit=b.bucket))
            for p in (self.shard, self.replicate, self.slices)
            for b in p.made
        ]

    def run(self, micro: Micro) -> None:
        """Go through one backward; what is small is there from the one before."""
        for pool in (self.shard, self.replicate, self.slices):
            pool.rest()
        if not micro.reduces:
            return
        lent: dict[fx.Node, list[_Buffer]] = {}
        ends: dict[int, list[_Buffer]] = {}  # bucket -> the slice in which its reduction ends
        for time, (_, node) in enumerate(self.life.nodes):
            if is_reduction(node):
                if self._ends_apart(node, micro):
                    size = [value(node).numel()]
                    ends[info(node).index] = _take(self.slices, node, size, time)
                if self.machine.backend == "gloo":
                    lent[node] = self._launch(node, time)
            elif kind_of(node) is Kind.WAIT and (launch := launch_of(node)) in lent:
                self._wait(launch, lent.pop(launch), time)
            elif kind_of(node) is Kind.STORE:
                self.slices.free += ends.pop(info(node).index, [])

    def _ends_apart(self, launch: fx.Node, micro: Micro) -> bool:
        """Tell whether a reduction ends in neither p.grad nor the buffer that it was packed in."""
        bucket = self.layout.buckets[info(launch).index]
        is_added = micro.before is Before.REDUCED and not self.layout.reduces_in_place(bucket)
        return not bucket.is_away and (is_added or bucket.reduce_dtype is not bucket.dtype)

    def _launch(self, launch: fx.Node, time: int) -> list[_Buffer]:
        shards, replicas = self.layout.shard_size, self.layout.replicate_size
        if shards > 1:
            return _take(self.shard, launch, _scattered(launch, shards, self.machine), time)
        return _take(self.replicate, launch, _landing(launch, replicas), time)

    def _wait(self, launch: fx.Node, lent: list[_Buffer], time: int) -> None:
        shards, replicas = self.layout.shard_size, self.layout.replicate_size
        pool = self.shard if shards > 1 else self.replicate
        sizes = _landing(launch, replicas)
        if shards == 1 and replicas > 2:
            pool.free += _take(pool, launch, sizes[:1], time)
        pool.free += lent
        if shards > 1 and replicas > 1:  # starts when the first has ended
            self.replicate.free += _take(
                self.replicate, launch, sizes + sizes[: replicas > 2], time
            )


def _take(pool: _Pool, launch: fx.Node, sizes: list[int], time: int) -> list[_Buffer]:
    return [pool.take(n, value(launch).dtype, time, info(launch).unit) for n in sizes]


def _scattered(launch: fx.Node, ranks: int, machine: Machine) -> list[int]:
    """Return the numels that a reduce-scatter over `ranks` receives into."""
    out = value(launch)
    if machine.algorithm("reduce", "gloo", nbytes(out) * ranks, ranks) == "direct":
        return [out.numel()] * (ranks - 1)
    return [out.numel() * ranks]


def _landing(launch: fx.Node, ranks: int) -> list[int]:
    """Return the numels that an all-reduce over `ranks` receives into: whole, or by slices."""
    numel = value(launch).numel()
    if ranks == 1:
        return []
    return [numel] if ranks == 2 else [-(-numel // ranks)] * (ranks - 1)
