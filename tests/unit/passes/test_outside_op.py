"""An op that zerofx does not have, declared outside of it: an all-gather of 8-bit blocks.

docs/contributing.md walks through this file. Nothing under zerofx/ knows of it, yet the op is
dumped, scheduled, priced, proved within its declared error, emitted, read back, and trains on two
real ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES
from mutants import Base
from mutants_judge import check_every_kind
from oracle import differences, execute
from oracle_cases import FINE, Choice, captured, final, make_state
from pool import Pool
from torch import Tensor, fx

import zerofx
from zerofx import ops
from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import ProgramError
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.program import Planned
from zerofx.ir.spec import Bounded, Carries, Kind, Lane, OpSpec, Payload, define, slot_of
from zerofx.ir.verify import bounds, verify
from zerofx.ops.gathers import erase_to_bucket, fake_full, is_in_slot, order_gather
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.order import added_pass
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan

BLOCK = 64  # neighbouring elements that share one scale
GPT = CASES["gpt"]


# -- 1. The arithmetic: codes of 8 bits, and one scale per block ---------------------------------
def encode(shard: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a flat shard, its last block padded with zeros."""
    padded = torch.nn.functional.pad(shard.float(), (0, -shard.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1) / 127
    codes = (padded / scales.clamp_min(1e-38)[:, None]).round().to(torch.int8)
    return codes.view(-1), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.view(-1, BLOCK).float() * scales[:, None]).view(-1)


def wire_bytes(numel: int) -> int:
    """Return the bytes of a shard's codes and scales."""
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK + torch.float32.itemsize)


# -- 2. The engine's method: what a rank does ----------------------------------------------------
@dataclass
class Blocks:
    """Codes and scales on their way. tensor: holds the parameters once they were waited for."""

    tensor: Tensor
    codes: Tensor
    scales: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        parts = zip(self.codes, self.scales, strict=True)
        for mine, (codes, scales) in zip(self.tensor.view(len(self.codes), -1), parts, strict=True):
            mine.copy_(decode(codes, scales)[: mine.numel()])
        return self.tensor


def gather_blocks(
    engine: Any, shard: Tensor, bucket: int, numel: int, slot: int = -1, dtype: Any = None
) -> Blocks:
    """Launch the all-gather of a bucket's codes and scales into `slot`."""
    b, ranks = engine.layout.buckets[bucket], engine.layout.shard_size
    with torch.no_grad():
        codes, scales = encode(shard)
    all_codes, all_scales = (t.new_empty(ranks, t.numel()) for t in (codes, scales))
    works = [
        engine.world.all_gather(all_codes.view(-1), codes, f"codes of {b.label()}"),
        engine.world.all_gather(all_scales.view(-1), scales, f"scales of {b.label()}"),
    ]
    out = engine.slots.take(slot, b.numel, b.compute_dtype)
    return Blocks(out, all_codes, all_scales, works)


def in_a_graph(calls: Any, shard: Tensor, bucket: int, numel: int, slot: int = -1, **_: Any) -> Any:
    return calls.moved(calls.engine.gather_blocks(shard, bucket, numel, slot))


# -- 3. What the planner asks: bytes on the wire, time, memory -----------------------------------
def sent(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    ranks = program.layout.shard_size
    if ranks == 1:
        return []
    return [Payload("all_gather", wire_bytes(value(node).numel() // ranks) * (ranks - 1), 1)]


def task(w: Walk, node: fx.Node) -> None:
    ranks = w.layout.shard_size
    w.collective(node, "all_gather", wire_bytes(value(node).numel() // ranks) * ranks)


def hold(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the gathered bucket, and the codes and scales that are held until the wait."""
    name, val = info(node).unit, value(node)
    full = p.own(node, Category.GATHERED, val, time, slot_of(node), name=name)
    coded = val.new_empty(wire_bytes(val.numel()), dtype=torch.int8)
    return full + p.own(node, Category.COMMUNICATION, coded, time, name="codes and scales")


# -- 4. What the tests' independent executor does with it ----------------------------------------
def oracle(
    rank: Any, shard: Tensor, bucket: int, numel: int, slot: int, dtype: Any
) -> Iterator[None]:
    b = rank.bucket(bucket, numel)
    dest = rank.memory.place(slot, b.numel, dtype or b.dtype)
    seen = decode(*encode(shard))[: shard.numel()]
    return (yield from rank.gather_into(dest, seen.to(shard.dtype), bucket, "gather-blocks"))


# -- 5. The declaration --------------------------------------------------------------------------
gather_blocks_op = define(
    OpSpec(
        schema="gather_blocks(Tensor shard, int bucket, int numel, int slot=-1, *, "
        "ScalarType? dtype=None) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.PARAMETERS,
        axis="shard",
        bucket=1,
        slot=3,
        fake=fake_full,
        run=in_a_graph,
        runtime=gather_blocks,
        lane=Lane("block gather"),
        verb="QG",
        means="all-gather of 8-bit blocks",
        task=task,
        sends=sent,
        hold=hold,
        arrive=lambda p, node, time: p.held[node.args[0]][:1],
        is_static=is_in_slot,
        adds=lambda node: nbytes(value(node)),
        stem="blocks",
        place="gather",
        order=order_gather,  # as memory sees it, an all-gather like the other
        erase=erase_to_bucket,  # and what it delivers is the bucket,
        precision=Bounded(relative=0.5 / 127, block=BLOCK),  # within half a step of its code
        oracle=oracle,
    )
)


# -- 6. The pass ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class QuantiseGathers(Pass):
    """Gather parameters as 8-bit blocks."""

    name: ClassVar[str] = "quantise-gathers"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    def run(self, program: Planned) -> Report:
        gathers = [
            n
            for gm in program.graphs.values()
            for n in gm.graph.nodes
            if n.target is ops.all_gather
        ]
        for node in gathers:
            node.target = gather_blocks_op
        return Report(bool(gathers), f"{len(gathers)} gathers in blocks of {BLOCK}")


def quantised() -> AbstractContextManager[None]:
    """Run the pass in every pipeline that is built in the block."""
    return added_pass(lambda setting: QuantiseGathers(), after="shard-parameters")


CHOICE = Choice(3, units=FINE)


@cache
def rewritten() -> Planned:
    """Return the program under a plan that does not ask for the captured bits."""
    setting = CHOICE.setting()
    plan = Plan(**{**setting.plan.to_dict(), "numerics": "fast"})
    with quantised():
        return run(captured("gpt", FINE), replace(setting, plan=plan))


@dataclass(frozen=True)
class BlockBase(Base):
    """The program with block gathers, for the mutants."""

    @property
    def program(self) -> Planned:
        return rewritten()


# -- What it must show ---------------------------------------------------------------------------
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=200))
def test_the_arithmetic_keeps_the_declared_bound(values: list[float]) -> None:
    shard = torch.tensor(values)
    seen = decode(*encode(shard))[: shard.numel()]
    rule = bounds(rewritten())["gather_blocks"]
    for first in range(0, len(values), BLOCK):
        block, got = shard[first : first + BLOCK], seen[first : first + BLOCK]
        assert (block - got).abs().max() <= rule.relative * block.abs().max() * (1 + 1e-5) + 1e-36


def test_it_is_dumped_scheduled_and_priced() -> None:
    program = rewritten()
    dump, schedule = program.dump(), str(program.schedule())
    assert "zfx.gather_blocks(" in dump and "zfx.all_gather(" not in dump and "blocks_1" in dump
    assert "QG b2" in schedule and "block gather" in schedule
    assert "QG all-gather of 8-bit blocks" in schedule
    plain = traffic(final("gpt", CHOICE)).kinds["all_gather"]
    coded = traffic(program).kinds["all_gather"]
    assert coded.calls == plain.calls and 0.25 < coded.sent_bytes / plain.sent_bytes < 0.4
    times = zerofx.predict(program, hardware="dgx-h100")
    assert "block gather" in str(program.look(hardware="dgx-h100")) and times.step_us > 0
    assert "codes and scales" in {s.name for s in program.memory().memory.life.storages}


def test_it_is_proved_within_its_error() -> None:
    from zerofx.tools.views.proof import ProofView

    program = rewritten()
    verify(program)
    assert "except for gather_blocks: each value is within 0.00394" in str(ProofView.of(program))
    exact = program.clone()
    exact.plan = CHOICE.plan()
    with pytest.raises(
        ProgramError, match=r"delivers values within 0\.00394 .* allows exact ops only"
    ):
        verify(exact)


def test_on_simulated_ranks_the_error_is_small_and_there() -> None:
    state = make_state("gpt", 2)
    exact = execute([final("gpt", CHOICE)] * 2, state)
    coded = execute([rewritten()] * 2, state)
    assert differences(exact, coded), "eight bits round"
    for a, b in zip(exact, coded, strict=True):
        for key, there in a.results.items():
            if isinstance(there, Tensor) and there.is_floating_point():
                assert torch.allclose(there, b.results[key], rtol=0.2, atol=0.02), key


def test_mutants_of_it_are_refused() -> None:
    check_every_kind(BlockBase("gpt", CHOICE))


def test_it_is_emitted_and_read_back(tmp_path: Path) -> None:
    program = rewritten()
    program.emit(tmp_path)
    text = (tmp_path / "schedule.py").read_text()
    assert "rt.gather_blocks(shards[" in text and "rt.all_gather(" not in text
    loaded = zerofx.load_program(tmp_path)
    for name in program.graphs:
        targets = [[n.target for n in p.graph(name).nodes] for p in (program, loaded)]
        assert targets[0].count(gather_blocks_op) == targets[1].count(gather_blocks_op) > 0
    (tmp_path / "schedule.py").write_text(text.replace("bucket=1", "bucket=0", 1))
    with pytest.raises(ProgramError, match="is not its shard"):
        zerofx.load_program(tmp_path)


# -- on two ranks --------------------------------------------------------------------------------
def losses(is_quantised: bool) -> tuple[list[float], bool]:
    rank = int(os.environ.get("RANK", "0"))
    plan = {"stage": 3, "kernels": "aten", "units": list(FINE), "persist_below": 100}
    plan |= {"numerics": "fast"}
    with quantised() if is_quantised else nullcontext():
        model = zerofx.compile(GPT.make(), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(6):
            loss = model(*GPT.batch(rank)[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    graphs = [gm.graph for p in model.programs for gm in p.graphs.values()]
    return found, any(n.target is gather_blocks_op for g in graphs for n in g.nodes)


def test_it_trains_on_two_ranks(pool: Pool) -> None:
    coded, plain = pool.run(2, losses, True), pool.run(2, losses, False)
    for (mine, has_blocks), (theirs, has_none) in zip(coded, plain, strict=True):
        assert has_blocks and not has_none
        assert mine[-1] < 0.95 * mine[0], "it learns"
        assert mine != theirs and mine == pytest.approx(theirs, rel=0.02)
