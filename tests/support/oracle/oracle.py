"""The oracle: what a program computes on every rank, found by running it as adversely as allowed.

It interprets the fx graphs of a Program, at any stage of the pipeline, with real tensors and one to
a few simulated ranks in lock step, and shares no code with the verifier or the runtime. Memory that
holds nothing (released, or not landed yet) is NaN; a slot has one tenant; transfers land early or
late (`Delivery`). A program is wrong if any rank's result differs, or if it hangs or raises.

    outcomes = execute([program] * 2, state)              # one Outcome a rank
    assert not differences(expected, outcomes)
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle_exchange import Delivery, Exchange, scaled_sum
from oracle_memory import OracleError
from oracle_placed import uncut
from oracle_rank import Rank
from torch import Tensor

from zerofx.ir.meta import Role, info
from zerofx.ir.program import Planned, Program

_Key = tuple[str, str, int]


@dataclass(frozen=True)
class State:
    """What a training step starts from.

    params: canonical name -> full value. buffers: name -> value, equal on all ranks.
    inputs, tangents: per rank, by input and output leaf. seeds: per rank, of its generator.
    """

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Sequence[Mapping[int, Tensor]]
    tangents: Sequence[Mapping[int, Tensor]]
    seeds: Sequence[int]

    @property
    def world_size(self) -> int:
        return len(self.inputs)


@dataclass
class Outcome:
    """What a step leaves on one rank.

    results: outputs, input gradients, buffers and inputs after the step, by (role, name, index).
    gradients: full mean gradients by canonical name; from shards, each rank's own shard group's.
    shards: flat slices as they lie in memory, padding included: ("param" or "grad", bucket).
    """

    results: dict[_Key, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[tuple[str, int], Tensor] = field(default_factory=dict)


def execute(
    programs: Sequence[Program], state: State, delivery: Delivery = Delivery.LATE
) -> list[Outcome]:
    """Run one forward and backward on every rank in lock step; programs[r] is rank r's.

    Raises:
        OracleError: the ranks deadlock or an op's contract is broken.
        Exception: whatever an operator raises on what it was given.
    """
    assert len(programs) == state.world_size
    exchange = Exchange(state.world_size, delivery)
    ranks = [Rank(r, p, state, exchange) for r, p in enumerate(programs)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        lock_step([rank.step() for rank in ranks], exchange)
    exchange.check_finished()
    outcomes = [_outcome(rank) for rank in ranks]
    _assemble(ranks, outcomes)
    return outcomes


def lock_step(steps: list[Generator[None, None, None]], exchange: Exchange) -> None:
    """Advance each rank to its next block in turn, until all are done."""
    running = dict(enumerate(steps))
    while running:
        before = _progress(exchange, running)
        for rank, step in list(running.items()):
            try:
                next(step)
            except StopIteration:
                del running[rank]
        if _progress(exchange, running) == before and not exchange.send_pending():
            raise OracleError(f"deadlock: ranks {sorted(running)} wait for collectives")


def _progress(exchange: Exchange, running: Mapping[int, object]) -> tuple:
    transfers = [t for launched in exchange.posted for t in launched]
    sent = sum(t.sent is not None for t in transfers)
    return len(running), len(transfers), sent, sum(t.has_landed for t in transfers)


def _outcome(rank: Rank) -> Outcome:
    done = Outcome()
    for spec, value in rank.results:
        if isinstance(value, Tensor) and spec.role in (Role.OUTPUT, Role.INPUT_GRAD):
            done.results[spec.role.value, spec.name, spec.index] = value
    for name, value in rank.buffers.items():
        done.results["buffer", name, -1] = value
    for leaf, value in rank.inputs.items():
        done.results["input", "", leaf] = value
    done.shards |= {("grad", b): g for b, g in rank.memory.grads.items()}
    done.shards |= {("param", b): s for b, s in rank.shards.items()}
    return done


def mean_gradients(ranks: list[Rank]) -> dict[str, Tensor]:
    """Return the whole mean gradients of what ranks that share one program have run."""
    outcomes = [_outcome(rank) for rank in ranks]
    _assemble(ranks, outcomes)
    return outcomes[0].gradients


def _assemble(ranks: list[Rank], outcomes: list[Outcome]) -> None:
    """Give every rank the full mean gradients: of its own full ones, or of its group's shards.

    What is cut over the tensor axis is put together of all parts; what is not is each rank's own.
    """
    team = ranks[0].team
    if any(rank.full_grads for rank in ranks):
        scale = team * ranks[0].context / len(ranks)
        for name in ranks[0].full_grads:
            for place in range(team):
                mean = scaled_sum([r.full_grads[name] for r in ranks[place::team]], scale)
                for outcome in outcomes[place::team]:
                    outcome.gradients[name] = mean
    else:
        _of_shards(ranks, outcomes)
    cuts = {p.name: p.part for p in ranks[0].program.params.values()}
    cuts |= _join_tiles(ranks[0].program, outcomes)
    for name, part in cuts.items():
        if part is None or name not in outcomes[0].gradients:
            continue
        for first in range(0, len(ranks), team):
            mine = outcomes[first : first + team]
            whole = uncut([o.gradients[name] for o in mine], part.cut.dim, part.cut.groups)
            for outcome in mine:
                outcome.gradients[name] = whole


def _join_tiles(program: Planned, outcomes: list[Outcome]) -> dict[str, Any]:
    """Put the tiles of each rank's part together; return how each tiled parameter is cut."""
    tiles = [p for p in program.params.values() if p.tile is not None]
    tiles.sort(key=lambda p: p.tile.index)  # type: ignore[union-attr]
    owners = {p.tile.name: p.tile.part for p in tiles if p.tile is not None}
    for outcome in outcomes:
        for owner in owners:
            of_it = [p.name for p in tiles if p.tile is not None and p.tile.name == owner]
            found = [outcome.gradients.pop(name) for name in of_it if name in outcome.gradients]
            if found:
                outcome.gradients[owner] = torch.cat(found)
    return owners


def _of_shards(ranks: list[Rank], outcomes: list[Outcome]) -> None:
    for rank, outcome in zip(ranks, outcomes, strict=True):
        for bucket, names in rank.ops.packed.items():
            if bucket not in rank.memory.grads:
                continue
            flat = torch.cat([ranks[r].memory.grads[bucket] for r in rank.ops.group])
            for param in rank.ops.layout.buckets[bucket].params:
                if param.name in names:
                    piece = flat[param.offset : param.offset + param.numel]
                    outcome.gradients[param.name] = piece.view(param.shape)


# -- comparing ------------------------------------------------------------------------------------
def differences(
    expected: Sequence[Outcome], got: Sequence[Outcome], with_shards: bool = False
) -> list[str]:
    """Return where two runs differ in any bit, rank by rank; empty if nowhere.

    with_shards: also compare flat slices with their padding, which only programs of one layout
    have in common.
    """
    found = []
    for rank, (a, b) in enumerate(zip(expected, got, strict=True)):
        parts = [("result", a.results, b.results), ("gradient", a.gradients, b.gradients)]
        if with_shards:
            parts.append(("shard", a.shards, b.shards))  # type: ignore[arg-type]
        for what, left, right in parts:
            for key in sorted({*left, *right}, key=str):
                found += [f"rank {rank} {what} {key}: {w}" for w in _differ(left, right, key)]  # type: ignore[arg-type]
    return found


def far_off(expected: Sequence[Outcome], got: Sequence[Outcome]) -> list[str]:
    """Return where two runs differ by more than sums of another order do; empty if nowhere."""
    found = []
    for rank, (a, b) in enumerate(zip(expected, got, strict=True)):
        left, right = {**a.results, **a.gradients}, {**b.results, **b.gradients}
        for key in sorted({*left, *right}, key=str):
            if key not in left or key not in right or left[key].shape != right[key].shape:
                found.append(f"rank {rank} {key}: it is missing, or of another shape")
                continue
            off = (right[key] - left[key]).abs().max()
            if not off <= 2e-5 * left[key].abs().max() + 1e-8:
                found.append(f"rank {rank} {key}: {off} off")
    return found


def _differ(left: Mapping, right: Mapping, key: object) -> list[str]:
    if key not in left or key not in right:
        return ["only in the expected run" if key in left else "not in the expected run"]
    a, b = left[key], right[key]
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"]
    if same_bits(a, b):
        return []
    return [f"{int((_bytes(a) != _bytes(b)).sum())} of {_bytes(a).numel()} bytes differ"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of one shape and dtype hold the same bits (NaN equals itself)."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def has_garbage(outcomes: Sequence[Outcome]) -> bool:
    """Say whether any result or gradient holds a NaN."""
    values = [v for o in outcomes for v in (*o.results.values(), *o.gradients.values())]
    return any(v.is_floating_point() and bool(v.isnan().any()) for v in values)


# -- making a state -------------------------------------------------------------------------------
def make_tangents(program: Planned, seed: int) -> dict[int, Tensor]:
    """Return random incoming gradients, in the shapes and strides that backward takes."""
    generator = torch.Generator().manual_seed(seed)
    graph = "joint" if "joint" in program.graphs else "backward"
    if graph not in program.graphs:
        return {}
    tangents = {}
    for node in program.placeholders(graph, Role.TANGENT):
        val = node.meta["val"]
        made = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
        tangents[info(node).index] = made.copy_(torch.randn(val.shape, generator=generator))
    return tangents
