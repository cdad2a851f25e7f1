"""quantize: collectives in 8-bit blocks, whose values differ within a declared bound."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

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
from torch import Tensor

import zerofx
from zerofx import ops
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import PlanError, ProgramError
from zerofx.ir.program import Planned
from zerofx.ir.verify import verify
from zerofx.kernels.blocks import (
    BLOCK,
    RELATIVE_ERROR,
    SMALLEST,
    add_decoded,
    decode,
    encode,
    message_bytes,
)
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan

CHOICE = Choice(3, units=FINE)
OFFLOAD = {"optimizer": "cpu", "parameters": "cpu"}
FIELDS = {"numerics": "fast", "quantized_weights": True, "quantized_gradients": True}


@cache
def coded(**fields: Any) -> Planned:
    setting = CHOICE.setting()
    plan = Plan(**{**setting.plan.to_dict(), **FIELDS, **fields})
    return run(captured("gpt", FINE), replace(setting, plan=plan))


@dataclass(frozen=True)
class CodedBase(Base):
    """The coded program, for the mutants."""

    @property
    def program(self) -> Planned:
        return coded()


# -- the arithmetic -------------------------------------------------------------------------------
def through(values: Tensor) -> Tensor:
    message = torch.full((message_bytes(values.numel()),), 77, dtype=torch.int8)
    encode(values, message)
    out = torch.full_like(values, float("nan"))
    decode(message, out)
    added = torch.ones(values.numel())
    add_decoded(message, added)
    decoded = out if out.dtype is torch.float32 else out.float()
    rtol = torch.finfo(out.dtype).eps
    torch.testing.assert_close(added, decoded + 1, rtol=rtol, atol=rtol, equal_nan=True)
    return out


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=400))
def test_each_value_is_within_the_declared_bound(values: list[float]) -> None:
    given_ = torch.tensor(values)
    seen = through(given_)
    for first in range(0, len(values), BLOCK):
        block, got = given_[first : first + BLOCK], seen[first : first + BLOCK]
        allowed = RELATIVE_ERROR * block.abs().max() * (1 + 1e-5) + 128 * SMALLEST
        assert (block - got).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 512 * BLOCK + 5])
def test_every_format_and_size(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel).to(dtype)
    bound = RELATIVE_ERROR * values.float().abs().max()
    error = (through(values).float() - values.float()).abs().max()
    assert error <= bound * 1.01 + torch.finfo(dtype).eps * values.float().abs().max()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_does_not_arrive_as_a_number(bad: float) -> None:
    values = torch.randn(2 * BLOCK)
    values[3] = bad
    seen = through(values)
    assert not seen[:BLOCK].isfinite().any() and seen[BLOCK:].isfinite().all()


# -- the program ----------------------------------------------------------------------------------
def test_it_is_dumped_scheduled_and_priced() -> None:
    program, plain = coded(), final("gpt", CHOICE)
    dump, schedule = program.dump(), str(program.schedule())
    assert "zfx.all_gather_blocks(" in dump and "zfx.all_gather(" not in dump
    assert "zfx.reduce_scatter_blocks(" in dump and "zfx.reduce_scatter(" not in dump
    assert "AGq" in schedule and "all-gather in 8-bit blocks" in schedule
    assert "RSq" in schedule and "reduce-scatter in 8-bit blocks" in schedule
    exact, mine = traffic(plain), traffic(program)
    assert mine.kinds["all_gather"].calls == exact.kinds["all_gather"].calls
    assert mine.kinds["all_to_all"].calls == exact.kinds["reduce_scatter"].calls
    held = [s for s in program.memory().memory.life.storages if s.name == "codes and scales"]
    assert len(held) == sum(
        n.target in CODED for g in program.graphs.values() for n in g.graph.nodes
    )
    assert zerofx.predict(program, hardware="dgx-h100").step_us > 0


CODED = (ops.all_gather_blocks, ops.reduce_scatter_blocks)


def test_a_quarter_of_the_bytes_travels_where_blocks_are_full() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    captured_ = zerofx.capture(model, (torch.zeros(4, 256),))
    plan = {"stage": 3, "persist_below": 0}
    exact = traffic(zerofx.rewrite(captured_, Plan(**plan), 4)).sent_bytes
    mine = traffic(zerofx.rewrite(captured_, Plan(**plan, **FIELDS), 4)).sent_bytes
    assert 0.25 < mine / exact < 0.27


def test_it_is_proved_within_its_error() -> None:
    verify(coded())
    exact = coded().clone()
    exact.plan = CHOICE.plan()
    with pytest.raises(ProgramError, match=r"delivers values within 0\.00394 .* exact ops only"):
        verify(exact)


def test_on_simulated_ranks_the_error_is_small_and_there() -> None:
    state = make_state("gpt", 2)
    exact = execute([final("gpt", CHOICE)] * 2, state)
    mine = execute([coded()] * 2, state)
    assert differences(exact, mine), "eight bits round"
    for a, b in zip(exact, mine, strict=True):
        for key, there in a.results.items():
            if isinstance(there, Tensor) and there.is_floating_point():
                assert torch.allclose(there, b.results[key], rtol=0.2, atol=0.02), key


def test_mutants_of_it_are_refused() -> None:
    check_every_kind(CodedBase("gpt", CHOICE))


def test_it_is_emitted_and_read_back(tmp_path: Path) -> None:
    program = coded()
    program.emit(tmp_path)
    text = (tmp_path / "schedule.py").read_text()
    assert "rt.all_gather_blocks(shards[" in text and "rt.reduce_scatter_blocks(" in text
    loaded = zerofx.load_program(tmp_path)
    for name in program.graphs:
        targets = [[n.target for n in p.graph(name).nodes] for p in (program, loaded)]
        for op in CODED:
            assert targets[0].count(op) == targets[1].count(op)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantized_weights": True}, "numerics='fast'"),
        ({"quantized_weights": True, "numerics": "fast", "stage": 2}, "Raise stage"),
        ({"quantized_gradients": True, "numerics": "fast", "stage": 0}, "Raise stage"),
        (
            {"quantized_gradients": True, "numerics": "fast", "sparse_gradients": True},
            "Change one of them",
        ),
    ],
)
def test_what_it_does_not_go_with_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan(**fields)


# -- on ranks -------------------------------------------------------------------------------------
def trained(case: str, plan: dict[str, Any], steps: int = 6) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of some steps, and what was sent."""
    rank = int(os.environ.get("RANK", "0"))
    model = zerofx.compile(CASES[case].make(), {"kernels": "aten", "persist_below": 100, **plan})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = model(*CASES[case].batch(rank)[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    sent = {k: t.sent_bytes for k, t in model.zerofx.world.counters.items()}
    return found, sent


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"stage": 3}),
        pytest.param(2, {"stage": 3, "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(2, {"stage": 3, "activations": "recompute"}, marks=pytest.mark.slow),
        pytest.param(2, {"stage": 3, "offload": OFFLOAD}, marks=pytest.mark.slow),
        pytest.param(4, {"stage": 3, "shard_axis_size": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"stage": 3}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_it_trains_as_the_exact_program_does(pool: Pool, ranks: int, plan: dict[str, Any]) -> None:
    plain = pool.run(ranks, trained, "gpt", {**plan, "numerics": "fast"})
    for (mine, sent), (theirs, theirs_sent) in zip(
        pool.run(ranks, trained, "gpt", {**plan, **FIELDS}), plain, strict=True
    ):
        assert mine[-1] < 0.95 * mine[0], "it learns"
        assert mine != theirs and mine == pytest.approx(theirs, rel=0.02)
        assert sent["all_to_all"] > 0 == sent["reduce_scatter"]
        assert sent["all_gather"] < theirs_sent["all_gather"]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_alone(pool: Pool, stage: int) -> None:
    plan = {"stage": stage, "numerics": "fast"}
    plain = pool.run(2, trained, "gpt", plan)
    mine = pool.run(2, trained, "gpt", {**plan, "quantized_gradients": True})
    for (losses, sent), (exact, _) in zip(mine, plain, strict=True):
        assert losses != exact and losses == pytest.approx(exact, rel=0.02)
        assert sent["all_to_all"] > 0 == sent["reduce_scatter"]
