"""Worlds that span hosts, here pretended: a board a host, and the store between the hosts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Died, Pool
from test_world_failures import error_of

from zerofx.comm import hosts
from zerofx.comm.meeting import timeout_s
from zerofx.comm.world import World
from zerofx.errors import PlanError


def spread(
    per_host: int, connect: Callable[..., World] = World.connect, args: tuple[Any, ...] = ("cpu",)
) -> World:
    """Connect as if every `per_host` ranks were a host."""
    name = f"host-{int(os.environ['RANK']) // per_host}"
    with pytest.MonkeyPatch.context() as patch:  # the next test runs in this process too
        patch.setattr(hosts, "host_key", lambda: name)
        return connect(*args)


def agree_and_differ(per_host: int) -> list[str]:
    world = spread(per_host)
    for call in range(5):
        world.agree(f"forward {call}", "stage=3")
    out = torch.empty(world.size)
    world.all_gather(out, torch.tensor([float(world.rank)])).wait()
    assert out.tolist() == list(range(world.size))
    odd = world.rank == world.size - 1
    errors = [
        error_of(lambda: world.agree("state_dict" if odd else "forward 5", "stage=3")),
        error_of(lambda: world.agree("forward 6", f"model=gpt; stage={2 if odd else 3}")),
    ]
    world.agree("forward 7", "stage=3")
    return errors


@pytest.mark.parametrize(("size", "per_host"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_hosts_agree_through_the_store(pool: Pool, size: int, per_host: int) -> None:
    most = "rank 0 runs" if size == 2 else f"ranks {', '.join(map(str, range(size - 1)))} run"
    for calls, digests in pool.run(size, agree_and_differ, per_host):
        odd = f"rank {size - 1} is about to run"
        assert calls.startswith(f"{odd} state_dict (call 6) while {most} forward 5")
        assert digests.startswith(
            f"{odd} forward 6 (call 7) with stage=2 while {most} forward 6 with stage=3"
        )


def late_host() -> str:
    os.environ["ZEROFX_TIMEOUT_S"] = "1"
    world = spread(1)
    world.agree("forward 0", "")
    if world.rank == 1:
        time.sleep(2.5)
    return error_of(lambda: world.agree("forward 1", ""))


def test_a_host_that_does_not_come_is_named(pool: Pool) -> None:
    waiting, late = pool.run(2, late_host)
    assert "a rank of host [1] did not arrive within 1 s" in waiting
    assert waiting.split(". ")[0] in late


def killed_on_another_host() -> str:
    world = spread(2)
    world.agree("forward 0", "")
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: world.agree("forward 1", ""))


@pytest.mark.slow
def test_a_rank_killed_on_another_host_is_named(pool: Pool) -> None:
    *living, dead = pool.run(4, killed_on_another_host, may_die=True)
    assert dead == Died(-signal.SIGKILL)
    assert all("rank 3, last at forward 0 (call 1), died" in message for message in living)


def stuck_on_another_host() -> str:
    os.environ["ZEROFX_TIMEOUT_S"] = "1"
    from zerofx.comm import watchdog

    watchdog._PROGRESS_S = 0.2
    world = spread(1)
    world.agree("forward 0", "")
    if world.rank == 1:
        time.sleep(3)
        return ""
    work = world.all_gather(torch.empty(2), torch.zeros(1), "all-gather of bucket 0 (w)")
    return error_of(work.wait)


def test_the_late_rank_of_another_host_is_named_in_mid_call(pool: Pool) -> None:
    message, _ = pool.run(2, stuck_on_another_host)
    assert "rank 0 waits in all-gather of bucket 0 (w) of forward 0 (call 1)" in message
    assert "rank 1 has not arrived within 1 s" in message


@pytest.mark.parametrize("text", ["soon", "", "0", "-3", "nan", "inf", "1e12"])
def test_a_timeout_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ZEROFX_TIMEOUT_S", text)
    with pytest.raises(PlanError, match=f"ZEROFX_TIMEOUT_S is '{text}'. It must be a number"):
        timeout_s()
