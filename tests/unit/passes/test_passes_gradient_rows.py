"""Gradients of tables that travel by the rows that were looked up, with the same values."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.analysis.time.traffic import traffic
from zerofx.comm.collectives import ordered_sum
from zerofx.errors import PlanError, ProgramError
from zerofx.ir.program import Planned
from zerofx.ir.spec import is_reduction
from zerofx.ir.verify import verify
from zerofx.runtime.wire.rows import sum_rows

ROWS, WIDTH = 1001, 6
DENSE = {ops.all_reduce, ops.reduce_scatter}


class Reader(nn.Module):
    """A table that is used twice, one of bags, one that the head shares, and a layer."""

    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=3, sparse=is_sparse)
        self.bag = nn.EmbeddingBag(777, WIDTH, mode="mean", sparse=is_sparse)
        self.tied = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        words = self.table(x).mean(1) + self.table(x.flip(1)[:, :2] + 1).sum(1)
        words = words + self.bag(x % 777) + self.tied(x % 50).mean(1)
        return nn.functional.cross_entropy(self.head(words), x[:, 0] % 50)


def batch(seed: int, length: int = 5) -> Tensor:
    return torch.randint(0, ROWS - 1, (4, length), generator=torch.Generator().manual_seed(seed))


def plan(stage: int, **fields: object) -> zerofx.Plan:
    small = {"persist_below": 0, "bucket_bytes": 0, "kernels": "aten", "islands": "refuse"}
    units = ["table", "bag", "tied", "head"]
    return zerofx.Plan(stage=stage, **{**small, "units": units, "sparse_gradients": True, **fields})


def rewritten(stage: int, world: int, **fields: object) -> Planned:
    captured = zerofx.capture(Reader(), (batch(0),))
    return zerofx.rewrite(captured, plan(stage, **fields), world_size=world)


def reductions(program: Planned) -> dict[str, object]:
    """Return what reduces each bucket, by its first parameter."""
    nodes = program.graph("backward").nodes
    found = {program.layout.buckets[n.args[1]]: n.target for n in nodes if is_reduction(n)}
    return {bucket.names[0]: target for bucket, target in found.items()}


@pytest.mark.parametrize(
    ("stage", "world", "op", "part"),  # parameters are gathered whole at stages 1 to 3
    [
        (0, 2, ops.all_reduce_rows, 0.2),
        (1, 2, ops.reduce_scatter_rows, 0.6),
        (3, 4, ops.reduce_scatter_rows, 0.8),
    ],
)
def test_tables_that_are_only_looked_up(
    stage: int, world: int, op: object, part: float, tmp_path: Path
) -> None:
    program, dense = rewritten(stage, world), rewritten(stage, world, sparse_gradients=False)
    found, before = reductions(program), reductions(dense)
    assert found.pop("table.weight") is op and found.pop("bag.weight") is op
    assert set(found.values()) <= DENSE and set(before.values()) <= DENSE
    assert traffic(program).sent_bytes < part * traffic(dense).sent_bytes
    # Two ranks receive a dense slice where its sum will be; rows have numbers of their own.
    assert program.memory().memory.peak_bytes < 1.01 * dense.memory().memory.peak_bytes
    program.emit(tmp_path)
    assert "indices=[" in (tmp_path / "schedule.py").read_text()
    assert reductions(zerofx.load_program(tmp_path)) == reductions(program)


def test_rows_that_are_left_out_are_found() -> None:
    program = rewritten(1, 2)
    launch = next(
        n for n in program.graph("backward").nodes
        if n.target is ops.reduce_scatter_rows and len(n.args[4]) == 2
    )  # fmt: skip
    launch.args = (*launch.args[:4], launch.args[4][:1])
    with pytest.raises(ProgramError, match=r"sends the rows \[.*\] of .*, which has those of"):
        verify(program)


def test_a_hybrid_mesh_reduces_densely_and_cuda_graphs_are_refused() -> None:
    program = rewritten(1, 4, shard_axis_size=2)
    assert set(reductions(program).values()) <= DENSE
    with pytest.raises(PlanError, match="sparse_gradients"):
        plan(0, cuda_graph=True)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4), height=st.integers(1, 12), width=st.integers(1, 9),
    seed=st.integers(0, 99), is_sharded=st.booleans(),
)  # fmt: skip
def test_the_sum_is_that_of_whole_tables(
    ranks: int, height: int, width: int, seed: int, is_sharded: bool
) -> None:
    draws = torch.Generator().manual_seed(seed)
    whole = [torch.zeros(height, width) for _ in range(ranks)]
    numbers = torch.full((ranks, height), -1)
    rows = torch.zeros(ranks, height, width)
    for rank, table in enumerate(whole):
        mine = torch.randperm(height, generator=draws)[: (seed + rank) % (height + 1)]
        table[mine] = torch.randn(len(mine), width, generator=draws)
        numbers[rank, : len(mine)], rows[rank, : len(mine)] = mine, table[mine]
    part = -(-height * width // ranks) + seed % 3 if is_sharded else height * width + seed % 3
    pad = part * (ranks if is_sharded else 1) - height * width
    flat = [nn.functional.pad(table.view(-1), (0, pad)) for table in whole]
    for rank in range(ranks if is_sharded else 1):
        parts = [each[rank * part : (rank + 1) * part] for each in flat]
        wanted, out = parts[0] / ranks, torch.full((part,), float("nan"))
        if ranks > 1:
            ordered_sum(parts, wanted, 1 / ranks)
        sum_rows(out, rank * part, numbers, rows, 1 / ranks)
        assert torch.equal(out, wanted)


# -- on two ranks ----------------------------------------------------------------------------------
def trained(stage: int, by_rows: bool, kind: str) -> tuple[list[Tensor], int]:
    """Return the weights after some steps, and what this rank has sent."""
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    precision = "bf16" if kind == "bf16" else "fp32"
    model = zerofx.compile(Reader(), plan(stage, sparse_gradients=by_rows, precision=precision))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    counters = model.zerofx.world.counters
    before = 0
    for step in range(4):
        length = 5 + 2 * rank * (kind == "lengths") + 300 * (kind == "many")
        parts = 2 if kind == "no_sync" else 1
        for part in range(parts):
            with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
                model(batch(10 * step + 2 * part + rank, length)).backward()
        if step == 0:
            before = sum(c.sent_bytes for c in counters.values())
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(c.sent_bytes for c in counters.values()) - before
    return list(zerofx.full_state_dict(model, rank0_only=False).values()), sent


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(0, "plain"), (1, "lengths"), (2, "many"), (3, "plain"), (1, "no_sync"), (3, "bf16")],
)
def test_training_is_that_of_dense_reductions(pool: Pool, stage: int, kind: str) -> None:
    by_rows, dense = (pool.run(2, trained, stage, rows, kind) for rows in (True, False))
    for (mine, sent), (theirs, dense_sent) in zip(by_rows, dense, strict=True):
        assert all(map(torch.equal, mine, theirs))
        if kind in ("plain", "lengths"):
            assert sent < dense_sent * (0.3, 0.65, 0.65, 0.8)[stage]
        else:  # sums of no_sync, and batches with most rows, are reduced whole
            assert sent < dense_sent * 1.01


OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def trained_sparsely(optimizer: str) -> list[Tensor]:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = zerofx.compile(Reader(is_sparse=True), plan(3))
    steps = OPTIMIZERS[optimizer](model.parameters())
    for step in range(4):
        model(batch(step).chunk(world)[rank]).backward()
        steps.step()
        steps.zero_grad()
    assert model.table.sparse and model.bag.sparse
    return list(zerofx.full_state_dict(model, rank0_only=False).values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tables_with_sparse_gradients_train_as_in_eager_pytorch(pool: Pool, optimizer: str) -> None:
    """Eager PyTorch makes sparse gradients there, the program dense ones, sent by rows."""
    torch.manual_seed(0)
    plain = Reader(is_sparse=True)
    steps = OPTIMIZERS[optimizer](plain.parameters())
    for step in range(4):
        plain(batch(step)).backward()
        steps.step()
        steps.zero_grad()
    for found in pool.run(2, trained_sparsely, optimizer):
        for mine, theirs in zip(found, plain.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def test_an_island_trains_them_too() -> None:
    class Branching(Reader):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if float(self.table(x).sum()) > 1e9 else 1.0)

    torch.manual_seed(0)
    model = zerofx.compile(Branching(is_sparse=True), plan(3, islands="auto"))
    torch.manual_seed(0)
    plain = Reader(is_sparse=True)
    for each in (model, plain):
        each(batch(1)).backward()
    assert plain.table.weight.grad is not None and plain.table.weight.grad.is_sparse
    torch.testing.assert_close(model.table.weight.grad, plain.table.weight.grad.to_dense())
