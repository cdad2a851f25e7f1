"""What reductions receive into: buffers that the collectives lend, keep, and free between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.analysis.storage import Category, Lifetimes, Storage
from zerofx.ir import ops
from zerofx.ir.meta import Info, info, nbytes, value
from zerofx.ir.program import Program
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
    """One axis's receive buffers, lent as runtime/collectives.py's Scratch lends them."""

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


def receive_buffers(program: Program, life: Lifetimes) -> list[Storage]:
    """Return the receive buffers of a step in the steady state.

    NCCL receives into buffers of its own, which are not counted.
    """
    machine = program.machine or preset("cpu-gloo")
    if program.layout is None or machine.backend != "gloo":
        return []
    rest_bytes = program.layout.rest_bytes
    pools = _Pool(life.end, rest_bytes), _Pool(life.end, rest_bytes)
    for _ in range(2):  # the first step leaves behind what the second finds
        for pool in pools:
            pool.rest()
        _run(program, life, machine, *pools)
    kind, name = Category.COMMUNICATION, "receive buffer"
    return [
        Storage(kind, b.nbytes, name, b.birth, b.death, Info(unit=b.bucket))
        for pool in pools
        for b in pool.made
    ]


def _run(
    program: Program, life: Lifetimes, machine: Machine, shard: _Pool, replicate: _Pool
) -> None:
    assert program.layout is not None
    shards, replicas = program.layout.shard_size, program.layout.replicate_size
    lent: dict[fx.Node, list[_Buffer]] = {}
    for time, (_, node) in enumerate(life.nodes):
        if node.target in ops.REDUCES:
            if shards > 1:
                lent[node] = _take(shard, node, _scattered(node, shards, machine), time)
            elif replicas > 1:
                lent[node] = _take(replicate, node, _landing(node, replicas), time)
        elif node.target is ops.wait and (launch := node.all_input_nodes[0]) in lent:
            pool = shard if shards > 1 else replicate
            if shards == 1 and replicas > 2:
                pool.free += _take(pool, launch, [_landing(launch, replicas)[0]], time)
            pool.free += lent.pop(launch)
            if shards > 1 and replicas > 1:  # starts when the first has ended
                sizes = _landing(launch, replicas)
                replicate.free += _take(replicate, launch, sizes + sizes[: replicas > 2], time)


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
    return [numel] if ranks == 2 else [-(-numel // ranks)] * (ranks - 1)
