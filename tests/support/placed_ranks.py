"""Ranks of one axis or two as threads, in lockstep: they run one graph, and meet at conversions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.comm.collectives import DONE, Axis, Work, ordered_sum
from zerofx.ir.meta import Placed, Role, info, value
from zerofx.ir.program import Program
from zerofx.layout.buckets import Mesh
from zerofx.layout.placements import Cut, Owned, P, R, join, part, serves
from zerofx.plan.parts import Parallel
from zerofx.runtime.capacity import Drops
from zerofx.runtime.graph_calls import GraphCalls


class Meeting:
    """Where the ranks of an axis leave tensors for each other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks)
        self.box: list[Any] = [None] * ranks

    def swap(self, rank: int, given: Any) -> list[Any]:
        self.box[rank] = given
        self.barrier.wait(timeout=60)
        found = list(self.box)
        self.barrier.wait(timeout=60)
        return found


class ThreadAxis(Axis):
    """An axis whose ranks are threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.ranks)
        self.meeting = meeting
        self.sent: list[int] = []  # around the ring

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "") -> Work:
        out.copy_(torch.cat(self.meeting.swap(self.rank, shard.clone())))
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor, scale: float, label: str = "") -> Work:
        parts = self.meeting.swap(self.rank, full.clone())
        mine = [p.view(self.size, -1)[self.rank] for p in parts]
        ordered_sum(mine, out, scale)
        return DONE

    def all_reduce(
        self, buf: Tensor, scale: float = 1.0, label: str = "", source: Tensor | None = None
    ) -> Work:
        parts = self.meeting.swap(self.rank, (buf if source is None else source).clone())
        ordered_sum(parts, buf, scale)
        return DONE

    def all_to_all(self, receives: Any, sends: Any, label: str = "") -> Work:
        given = self.meeting.swap(self.rank, [s.clone() for s in sends])
        for mine, theirs in zip(receives, given, strict=True):
            mine.copy_(theirs[self.rank])
        return DONE

    def shift(self, landing: Tensor, leaving: Tensor, label: str = "") -> Work:
        landing.copy_(self.meeting.swap(self.rank, leaving.clone())[self.rank - 1])
        self.sent.append(leaving.nbytes)
        return DONE


class Keeping(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.kept: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        found = self.kept[n] = super().run_node(n)
        return found


def run_whole(
    gm: fx.GraphModule, given: list[Tensor], engine: Any = None
) -> tuple[Any, dict[fx.Node, Any]]:
    """Return the results of a whole graph, and every value."""
    runner = Keeping(gm)
    with torch.no_grad(), GraphCalls(engine).active():
        return runner.run(*given), runner.kept


def on_threads(ranks: int, meetings: Iterable[Meeting], body: Callable[[int], Any]) -> list[Any]:
    """Run `body(rank)` on a thread each; return what each gives, or raise the first real error."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError))
    return results


def on_axes(parallel: Parallel, body: Callable[[int, Any], Any]) -> list[Any]:
    """Run `body(rank, engine)` on a thread each, for all ranks over which values are cut.

    Ranks of the tensor axis are neighbours.
    """
    sizes = {"shard": parallel.context, "context": parallel.context, "tensor": parallel.tensor}
    mesh = replace(Mesh.of(**sizes), zigzag=parallel.is_zigzag)
    layout, ranks = SimpleNamespace(mesh=mesh), range(parallel.value_ranks)
    meetings = {
        (axis, _line(mesh, axis, rank)): Meeting(size)
        for axis, size in parallel.value_axes.items()
        for rank in ranks
    }

    def run(rank: int) -> Any:
        axes = {
            axis: ThreadAxis(mesh.position(axis, rank), meetings[axis, _line(mesh, axis, rank)])
            for axis in parallel.value_axes
        }
        world = SimpleNamespace(axis=axes.__getitem__)
        engine = SimpleNamespace(
            world=world, layout=layout, wait=lambda flight: flight.wait(), drops=Drops()
        )
        return body(rank, engine)

    return on_threads(len(ranks), list(meetings.values()), run)


def run_ranks(
    gm: fx.GraphModule, given: list[list[Tensor]], parallel: Parallel
) -> tuple[list[Any], list[dict[fx.Node, Any]]]:
    """Return each rank's results of one graph, and every value."""
    found = on_axes(parallel, lambda rank, engine: run_whole(gm, given[rank], engine))
    results, kept = zip(*found, strict=True)
    return list(results), list(kept)


def _line(mesh: Mesh, axis: str, rank: int) -> tuple[int, ...]:
    """Return the ranks along an axis that this one is among."""
    first = rank - mesh.position(axis, rank) * mesh.stride(axis)
    return tuple(first + n * mesh.stride(axis) for n in range(mesh.along(axis)))


def notes_of(placed: Placed, parallel: Parallel) -> list[tuple[str, int, Any]]:
    """Return (axis, ranks, placement) over each axis, the one that was cut first first."""
    each: list[Any] = []
    note: Placed | None = placed
    while note is not None:
        each.append(note.gives)
        note = note.outer
    return [
        (axis, ranks, lies)
        for (axis, ranks), lies in zip(parallel.value_axes.items(), reversed(each), strict=True)
    ]


def together_over(values: list[Any], placed: Placed, parallel: Parallel) -> Any:
    """Return the whole value of what the ranks of all axes have."""
    for axis, ranks, lies in reversed(notes_of(placed, parallel)):
        rest = len(values) // ranks
        zigzag = axis == "context" and parallel.is_zigzag
        values = [together(values[at::rest], lies, zigzag) for at in range(rest)]
    (whole,) = values
    return whole


def together(values: list[Any], lies: Any, zigzag: bool = False) -> Any:
    """Return the whole value of what the ranks have."""
    if isinstance(values[0], (tuple, list)):
        pieces = zip(*values, strict=True)
        each = lies if isinstance(lies, tuple) else [lies] * len(values[0])
        return [together(list(v), at, zigzag) for v, at in zip(pieces, each, strict=True)]
    if values[0] is None or lies == R:
        return values[0]
    if isinstance(lies, Owned):
        each = torch.stack([v.movedim(lies.dim, 0).flatten(1).ne(0).any(1) for v in values])
        assert (each.sum(0) <= 1).all(), f"several ranks own a row: {lies}"
    if serves(lies, P):
        return sum(values[1:], values[0])
    assert isinstance(lies, Cut)
    return join(values, lies, zigzag)


def cut_for(whole: Tensor, placed: Placed, rank: int, parallel: Parallel) -> Tensor:
    """Return what a rank has of a value."""
    stride = 1
    for axis, ranks, lies in notes_of(placed, parallel):
        zigzag = axis == "context" and parallel.is_zigzag
        if isinstance(lies, Cut):
            whole = part(whole, lies, rank // stride % ranks, ranks, zigzag)
        stride *= ranks
    return whole


def values_of(program: Program, model: torch.nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return what a joint graph is given: the tangent of the loss is 1."""
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    found: list[Tensor] = []
    for node in program.placeholders("joint"):
        where = info(node)
        if where.role is Role.PARAM:
            found.append(params[where.name].detach())
        elif where.role is Role.BUFFER:
            found.append(buffers[where.name])
        elif where.role is Role.INPUT:
            found.append(inputs[where.name])
        else:
            found.append(torch.ones(tuple(value(node).shape)))
    return found
