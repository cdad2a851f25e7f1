"""Pipelines of which a rank dies or hangs in a stage: it is named, with the move that waits."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from pool import Died, Pool
from test_world_failures import without_places
from torch import Tensor, nn

import zerofx
from zerofx.errors import DesyncError


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def fails_in_a_move(verb: str, mailbox: str) -> str:
    """The second stage's rank dies, or stops itself, in a move of its second step."""
    if mailbox:
        os.environ["ZEROFX_TIMEOUT_S"] = "3"
    plan = zerofx.Plan(parallel={"pipeline": 2, "micro_batches": 4}, kernels="aten")
    model = zerofx.compile(Blocks(), plan)
    x = torch.randn(8, 8)
    model(x).backward()
    model.zero_grad()
    rank = model.zerofx.world.rank
    run = next(iter(model.zerofx.table.bound.values()))._pipeline
    right = getattr(run, verb)

    def wrong(stage: int, micro_batch: int, **more: bool) -> None:
        if micro_batch == 1:
            if mailbox:
                with open(mailbox, "w") as file:
                    file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP if mailbox else signal.SIGKILL)
        right(stage, micro_batch, **more)

    if rank == 1:
        setattr(run, verb, wrong)
    started = time.monotonic()
    try:
        with pytest.raises(DesyncError) as caught:
            model(x)
    finally:
        if mailbox and rank == 0:
            with open(mailbox) as file:
                os.kill(int(file.read()), signal.SIGCONT)
    assert time.monotonic() - started < 30
    return without_places(str(caught.value))


WAITS = "of micro-batch 1 from pipeline stage 1"


@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_a_rank_that_dies_in_a_stage_is_named(pool: Pool, verb: str) -> None:
    message, dead = pool.run(2, fails_in_a_move, verb, "", may_die=True)
    assert dead == Died(-signal.SIGKILL)
    assert "rank 1, last at training step of" in message and "died" in message
    assert WAITS in message, message


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_stage_is_named(pool: Pool, tmp_path: object) -> None:
    waiting, _ = pool.run(2, fails_in_a_move, "backward", f"{tmp_path}/pid")
    assert "within 3 s (ZEROFX_TIMEOUT_S)" in waiting and "rank 1" in waiting
    assert WAITS in waiting, waiting
