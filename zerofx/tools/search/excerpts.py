"""Ranks of a pipeline, each in a model with fewer layers: what their stages hold is kept.

A rank's programs depend on its own stages: how many layers each has, and whether the embedding or
the head is there too. Ranks with equal stages take equal times, and the first of them has the most
micro-batches under way. So one rank of each kind is compiled, in a pipeline of two or three ranks
whose others have a layer each. From some number of layers on, each two more add the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zerofx.ir.program import ParamInfo, Planned
from zerofx.passes.cut_stages import unit_positions
from zerofx.plan.parts import Parallel


@dataclass(frozen=True)
class Content:
    """The units of a pipeline stage: of the stack of layers, and before and after it."""

    before: int
    layers: int
    after: int


@dataclass(frozen=True)
class Excerpt:
    """One rank of a pipeline, in a model of `length` layers on a pipeline of `size` ranks.

    position: of the rank in the short pipeline. starts: the number of the unit with which each of
    its stages but the first begins. numbers: the short pipeline's stages, as the whole one counts
    them.
    """

    length: int
    size: int
    position: int
    starts: tuple[int, ...]
    numbers: tuple[int, ...]

    def own(self, whole: Parallel) -> range:
        """Return the stages of the rank, as the short pipeline counts them."""
        return range(self.position, self.size * whole.interleave, self.size)

    def shows(self, program: Planned) -> bool:
        """Tell whether a stage of the short pipeline sends and receives what the whole one does.

        What skips a stage goes elsewhere in a pipeline of another size.
        """
        is_whole = self.numbers == tuple(range(program.stage.size))
        return is_whole or all(abs(w.source - w.target) == 1 for w in program.stage.wires)

    def parallel(self, whole: Parallel, units: list[str]) -> Parallel:
        """Return the short pipeline. units: of the model of `length` layers."""
        cuts = tuple(units[start] for start in self.starts) or "auto"
        return replace(whole, pipeline=self.size, cuts=cuts, micro_batches=self.size)

    def renumbered(self, program: Planned, whole: Parallel) -> Planned:
        """Make a stage of the short pipeline one of the whole pipeline, and return it."""
        numbers, stage = self.numbers, program.stage
        every, at = tuple(range(whole.num_stages)), stage.position
        ahead = numbers[at] - at
        wires = tuple(
            replace(w, source=w.source + ahead, target=w.target + ahead)
            for w in stage.wires
            if at in (w.source, w.target)
        )
        program.stage = replace(stage, position=numbers[at], size=whole.num_stages, wires=wires)
        program.params = {
            name: replace(
                p,
                positions=every
                if len(p.positions) == stage.size
                else tuple(sorted(numbers[i] for i in p.positions)),
            )
            for name, p in program.params.items()
        }
        return program


@dataclass(frozen=True)
class RankKind:
    """Ranks with equal stages.

    positions: of them. stages: of one rank, in order. ahead: units of the model before its layers.
    """

    positions: tuple[int, ...]
    stages: tuple[Content, ...]
    ahead: int


def rank_kinds(
    params: Iterable[ParamInfo], parallel: Parallel, stack: str, layers: int
) -> list[RankKind]:
    """Return the kinds of ranks of a pipeline; none if its stages are not made of whole layers.

    Raises:
        PlanError: the model cannot be cut into as many stages.
    """
    at = unit_positions(params, parallel)
    units, own = list(at), [f"{stack}.{i}" for i in range(layers)]
    if own[0] not in at or units[(first := units.index(own[0])) : first + layers] != own:
        return []
    found = [Content(0, 0, 0)] * parallel.num_stages
    for number, unit in enumerate(units):
        each = found[at[unit]]
        if number < first:
            each = replace(each, before=each.before + 1)
        elif number < first + layers:
            each = replace(each, layers=each.layers + 1)
        else:
            each = replace(each, after=each.after + 1)
        found[at[unit]] = each
    if found[0].before < first:
        return []
    size = parallel.pipeline
    kinds: dict[tuple[Content, ...], list[int]] = {}
    for rank in range(size):
        kinds.setdefault(tuple(found[rank::size]), []).append(rank)
    return [RankKind(tuple(ranks), stages, first) for stages, ranks in kinds.items()]


def lengths(kind: RankKind, settled: int, stride: int) -> tuple[int, ...]:
    """Return by how many layers each of its stages is shortened; (0,) if that would gain nothing.

    With two numbers, the figures of the whole stage are extrapolated from those of both, which
    together have more layers than a stage that is little longer than they are.
    """
    least = min((s.layers for s in kind.stages), default=0)
    fewer = (least - settled) // stride * stride
    return (0,) if fewer <= 2 * stride else (fewer, fewer - stride)


def excerpt(kind: RankKind, fewer: int, parallel: Parallel, least: int) -> Excerpt:
    """Return the first rank of a kind, with `fewer` layers in each of its stages.

    least: layers of the model, if fewer do; those that are left over go to another rank.
    """
    rank, ranks, turns = kind.positions[0], parallel.pipeline, parallel.interleave
    size = min(ranks, 2 if rank in (0, ranks - 1) else 3)
    position = 0 if rank == 0 else 1
    own = [replace(s, layers=s.layers - fewer) for s in kind.stages]
    is_own = [number % size == position for number in range(size * turns)]
    counts = [own[n // size].layers if is_own[n] else 1 for n in range(size * turns)]
    if not is_own[-1] and own[-1].after:  # the last stage has the rest of the units
        counts[-1] = 0
    spare = max(0, least - sum(counts))
    counts[is_own.index(False)] += spare
    starts, at = [], kind.ahead
    for number, count in enumerate(counts[:-1]):
        at += count
        if is_own[number]:
            at += own[number // size].after
        starts.append(at)
    numbers = tuple(
        turn * ranks + rank + i - position for turn in range(turns) for i in range(size)
    )
    return Excerpt(sum(counts), size, position, tuple(starts), numbers)
