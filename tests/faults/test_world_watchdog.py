"""The watchdog's thread outlives a look that fails, and every wait has an end all the same."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pool import Pool
from test_world_failures import LABEL, error_of, step, without_places
from test_world_hosts import spread

from zerofx.comm.world import World
from zerofx.errors import DesyncError


def late_while_looking_fails(fails_for_s: float) -> tuple[str, list[str]]:
    """Rank 1 never comes, and rank 0's looks at it raise for a while."""
    os.environ["ZEROFX_TIMEOUT_S"] = "2"
    world = World.connect("cpu")
    step(world, 0)
    world.agree("forward of program 3fa1", "")
    if world.rank == 1:
        time.sleep(5)
        return "", []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerofx").addHandler(handler)
    agreement, until = world._agreement, time.monotonic() + fails_for_s
    assert agreement is not None
    lost = agreement.lost

    def failing(number: int = 0, broken: bool = False) -> str | None:
        if time.monotonic() < until:
            raise RuntimeError("no descriptor left")
        return lost(number, broken)

    agreement.lost = failing  # type: ignore[method-assign]
    out = torch.empty(2 * 4096)
    message = error_of(lambda: world.all_gather(out, torch.zeros(4096), LABEL).wait(), 10.0)
    logging.getLogger("zerofx").removeHandler(handler)
    return message, said


@pytest.mark.parametrize("fails_for_s", [1.0, 4.0])
def test_the_thread_survives_a_look_that_fails(pool: Pool, fails_for_s: float) -> None:
    (message, said), _ = pool.run(2, late_while_looking_fails, fails_for_s)
    if fails_for_s < 2:
        assert "rank 1 has not arrived within 2 s" in message
    else:
        assert "its watchdog fails: RuntimeError('no descriptor left')" in message
    looks = [text for text in said if "failed to check" in text]  # beside where the record is
    assert looks == [
        "zerofx: the watchdog failed to check the ranks: RuntimeError('no descriptor left')."
    ]


def late_without_a_store() -> str:
    """The store answers no more when the limit is reached."""
    os.environ["ZEROFX_TIMEOUT_S"] = "1"
    world = spread(1)
    world.agree("forward 0", "")
    if world.rank == 1:
        time.sleep(3)
        return ""

    def gone() -> dict[int, int]:
        raise DesyncError("the store no longer answers")

    assert world._agreement is not None and world._agreement.link is not None
    world._agreement.link.progress = gone  # type: ignore[method-assign]
    return error_of(lambda: world.all_gather(torch.empty(2), torch.zeros(1), LABEL).wait(), 10.0)


def test_a_wait_ends_at_its_limit_without_a_store(pool: Pool) -> None:
    message, _ = pool.run(2, late_without_a_store)
    assert f"rank 0 waits in {LABEL} of forward 0 (call 1)" in message
    assert "the ranks that have not arrived are unknown (the store no longer answers)" in message


LEAVES = """
import datetime, sys, torch, torch.distributed as dist
from zerofx.comm import gloo
from zerofx.errors import DesyncError
from zerofx.comm.world import World
rank = int(sys.argv[1])
gloo.timedelta = lambda milliseconds: datetime.timedelta(seconds=1)  # long inside gloo
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
world = World.connect("cpu")
world.agree("forward", "")
if rank == 1:
    try:
        world.all_gather(torch.empty(2), torch.zeros(1)).wait()
    except DesyncError as error:
        sys.stdout.write(str(error))
"""


def test_a_process_that_ends_while_the_thread_looks_does_not_abort(tmp_path: Path) -> None:
    environment = dict(os.environ, RANK="0", WORLD_SIZE="2")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "rank 0, last at forward (call 1), has left" in without_places(outputs[1][0])
