"""Borrowed buffers of collectives: receive buffers, reused by later ones, freed at the end.

The rules are those of the runtime (`runtime/policy`): this walk borrows stand-ins that have only a
size, in the order in which the runtime borrows buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zerofx.analysis.memory.micro import Before, Micro
from zerofx.analysis.memory.storage import Category, Lifetimes, Storage
from zerofx.ir.meta import Info, info, nbytes, value
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, is_exchange, kind_of, launch_of, spec_of
from zerofx.layout.buckets import Layout
from zerofx.policy import exchange, reduction, resting
from zerofx.policy.borrowing import Loan, Scratch
from zerofx.policy.exchange import Receives
from zerofx.policy.reduction import End, Leg


@dataclass(eq=False)
class _Buffer:
    """A stand-in for a buffer: its size, and its first and last time."""

    nbytes: int
    birth: int
    death: int
    bucket: str


class _Pool:
    """Buffers of one kind, borrowed as in the runtime.

    name: of its storages. end: the last time of a micro-batch.
    """

    def __init__(self, name: str, end: int, layout: Layout) -> None:
        self.name, self._end, self._layout = name, end, layout
        self._scratch: Scratch[_Buffer] = Scratch(self._make, self._dropped)
        self._time, self._unit = 0, ""
        self.made: list[_Buffer] = []

    def borrow(self, sizes: Iterable[int], launch: fx.Node, time: int) -> list[Loan[_Buffer]]:
        """Borrow buffers with these numbers of elements for a reduction, in its format."""
        self._time, self._unit = time, info(launch).unit
        return [self._scratch.borrow(numel, value(launch).dtype) for numel in sizes]

    def give_back(self, loans: Iterable[Loan[_Buffer]]) -> None:
        self._scratch.give_back(loans)

    def rest(self) -> None:
        """End a step: large buffers are freed, small ones persist into the next step."""
        self._time = 0
        self._scratch.rest(lambda nbytes: resting.frees(self._layout, nbytes))
        self.made = [b for b in self.made if b.death == self._end]
        for buffer in self.made:
            buffer.birth = 0

    def _make(self, numel: int, dtype: torch.dtype) -> _Buffer:
        made = _Buffer(numel * dtype.itemsize, self._time, self._end, self._unit)
        self.made.append(made)
        return made

    def _dropped(self, buffer: _Buffer) -> None:
        buffer.death = self._time - 1


def lent_buffers(program: Planned, life: Lifetimes, micro: Micro) -> list[Storage]:
    """Return the buffers that reductions and sums of values borrow in a steady-state micro-batch.

    Each one receives into buffers of gloo's axes (NCCL receives into buffers of its own, which are
    not counted). If a reduction cannot end in p.grad, because it is added to p.grad or has another
    format, it ends in a separate slice.
    """
    walk = _Walk(program, life)
    for step in (replace(micro, reduces=True), micro):  # the first leaves buffers for the second
        walk.run(step)
    return walk.storages()


class _Walk:
    """The walk through backwards, which borrows as the runtime does."""

    def __init__(self, program: Planned, life: Lifetimes) -> None:
        self.program, self.life, self.layout = program, life, program.layout
        self.hardware = program.hardware
        legs = {spec.legs(self.layout.mesh) for _, _, spec in life.ops if spec.is_reduction}
        axes = dict.fromkeys(leg.axis for each in sorted(legs, key=str) for leg in each)
        self.receive = {axis: _Pool("receive buffer", life.end, self.layout) for axis in axes}
        self.slices = _Pool("reduced slice", life.end, self.layout)
        self.values: dict[str, _Pool] = {}
        for _, node, spec in life.ops:
            if spec.is_exchange:
                axis: Any = node.args[1]
                self.values[axis] = _Pool("receive buffer", life.end, self.layout)
        self.pools = (*self.receive.values(), self.slices, *self.values.values())

    def storages(self) -> list[Storage]:
        return [
            Storage(Category.COMMUNICATION, b.nbytes, p.name, b.birth, b.death, Info(unit=b.bucket))
            for p in self.pools
            for b in p.made
        ]

    def run(self, micro: Micro) -> None:
        """Walk through one backward; small buffers remain from the previous one."""
        for pool in self.pools:
            pool.rest()
        loans: dict[fx.Node, list[Loan[_Buffer]]] = {}
        ends: dict[int, list[Loan[_Buffer]]] = {}  # bucket -> the slice that its reduction ends in
        is_set = micro.before is Before.REDUCED
        is_gloo = self.hardware.backend == "gloo"
        for time, node, spec in self.life.ops:
            if is_gloo and self._is_of_values(node, loans, time):
                continue
            if not micro.reduces:
                continue
            if spec.is_reduction:
                bucket = self.layout.buckets[info(node).index]
                if reduction.end_of(self.layout, bucket, is_set) is End.SLICE:
                    size = [value(node).numel()]
                    ends[bucket.index] = self.slices.borrow(size, node, time)
                borrows = spec.borrows(self.program, node)
                if is_gloo and self._legs(node) and borrows:
                    loans[node] = self._launch(node, time)
            elif spec.kind is Kind.WAIT and (launch := launch_of(node)) in loans:
                self._wait(launch, loans.pop(launch), time)
            elif spec.kind is Kind.STORE:
                self.slices.give_back(ends.pop(info(node).index, []))

    def _is_of_values(
        self, node: fx.Node, loans: dict[fx.Node, list[Loan[_Buffer]]], time: int
    ) -> bool:
        """Borrow or return buffers if the node launches or completes a collective of values."""
        if is_exchange(node):
            loans[node] = self._pool(node).borrow(self._of_values(node).at_launch, node, time)
            return True
        if kind_of(node) is not Kind.WAIT or not is_exchange(launch := launch_of(node)):
            return False
        pool = self._pool(launch)
        more = pool.borrow(self._of_values(launch).at_end, launch, time)
        pool.give_back([*loans.pop(launch), *more])
        return True

    def _pool(self, launch: fx.Node) -> _Pool:
        axis: Any = launch.args[1]
        return self.values[axis]

    def _of_values(self, launch: fx.Node) -> Receives:
        """Return the buffers that a rank borrows for a collective of values."""
        spec, axis = spec_of(launch), launch.args[1]
        assert spec is not None and spec.receives is not None, f"{launch} says no such thing"
        ranks = self.layout.mesh.along(axis)  # type: ignore[arg-type]

        def is_native(full_bytes: int) -> bool:
            return self.hardware.algorithm("reduce", "gloo", full_bytes, ranks) == "native"

        return spec.receives(launch, ranks, is_native)

    def _legs(self, launch: fx.Node) -> tuple[Leg, ...]:
        spec = spec_of(launch)
        assert spec is not None
        return spec.legs(self.layout.mesh)

    def _launch(self, launch: fx.Node, time: int) -> list[Loan[_Buffer]]:
        first = self._legs(launch)[0]
        sizes = self._receives(first, launch).at_launch * first.times
        return self.receive[first.axis].borrow(sizes, launch, time)

    def _wait(self, launch: fx.Node, loans: list[Loan[_Buffer]], time: int) -> None:
        first, *later = self._legs(launch)
        pool = self.receive[first.axis]
        more = pool.borrow(self._receives(first, launch).at_end, launch, time)
        pool.give_back([*loans, *more])
        for leg in later:  # each starts when the previous one has ended
            receives, pool = self._receives(leg, launch), self.receive[leg.axis]
            pool.give_back(pool.borrow(receives.at_launch + receives.at_end, launch, time))

    def _receives(self, leg: Leg, launch: fx.Node) -> Receives:
        """Return the buffers that a rank borrows for one leg of a reduction."""
        out = value(launch)
        if leg.kind == "all_reduce":
            return exchange.all_reduce_receives(out.numel(), 0, leg.size)
        way = self.hardware.algorithm("reduce", "gloo", nbytes(out) * leg.size, leg.size)
        return exchange.reduce_scatter_receives(out.numel(), leg.size, way == "native")
