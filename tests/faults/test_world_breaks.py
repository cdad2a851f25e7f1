"""An exception on some ranks in the middle of a call: who raises, who may go on, what is said."""

from __future__ import annotations

import os
import time

import pytest
import torch
from pool import Pool
from simulated import run_ranks
from test_world_failures import LABEL, error_of, step
from test_world_hosts import spread

from zerofx.comm import agreement, hosts
from zerofx.comm.world import World

BROKEN = "broken off by ValueError('boom')"


def launch(world: World) -> None:
    world.all_gather(torch.empty(2 * 4096), torch.zeros(4096), LABEL).wait()


def raises_in_mid_call(per_host: int) -> str:
    """Rank 0 raises between two collectives of a call, and takes its time over it."""
    world = spread(per_host)
    world.agree("backward of N", "")
    launch(world)
    if world.rank == 0:
        world.report_failure("ValueError('boom')")
        world.drain()
        time.sleep(3)
        return error_of(lambda: step(world, 2))
    return error_of(lambda: launch(world))


@pytest.mark.parametrize("per_host", [2, 1])
def test_the_others_learn_of_an_exception_at_once(pool: Pool, per_host: int) -> None:
    failed, waiting = pool.run(2, raises_in_mid_call, per_host)
    assert waiting.startswith(
        f"rank 0, last at backward of N (call 1), {BROKEN}, does not continue. "
    )
    assert "Rank 1 " in waiting and f"waits in {LABEL}" in waiting
    assert waiting.split(". ")[0] in failed


def raises_after_its_launches(per_host: int) -> str:
    """Rank 1 has finished the call that rank 0 broke off after its last collective."""
    world = spread(per_host)
    step(world, 0)
    if world.rank == 0:
        world.report_failure("ValueError('boom')")
        time.sleep(3)
        return ""
    return error_of(lambda: step(world, 1))


@pytest.mark.parametrize("per_host", [2, 1])
def test_a_rank_does_not_wait_for_one_that_broke_off_before(pool: Pool, per_host: int) -> None:
    _, message = pool.run(2, raises_after_its_launches, per_host)
    assert message.startswith(f"rank 0, last at forward of program 3fa0 (call 1), {BROKEN}, does ")
    assert "Rank 1 is about to run forward of program 3fa1 (call 2)" in message


def both_arrive(world: World) -> str:
    """The rank that broke off is at its next call before the other looks."""
    step(world, 0)
    if world.rank == 0:
        world.report_failure("ValueError('boom')")
    else:
        time.sleep(0.5)
    return error_of(lambda: world.agree("forward of program 3fa1", "stage=3"))


def test_a_rank_that_failed_alone_cannot_go_on() -> None:
    for message in run_ranks(2, both_arrive):
        assert message.startswith("rank 1 is about to run forward of program 3fa1 (call 2) with ")
        assert "rank 0 runs forward of program 3fa1 with the call before=broken off" in message
        assert message.endswith(" Rank 0 broke off call 1: ValueError('boom').")


def fail_alike(per_host: int) -> list[float]:
    world = spread(per_host)
    seen = []
    for number in range(3):
        world.agree(f"backward {number}", "")
        out = torch.empty(2)
        work = world.all_gather(out, torch.tensor([float(world.rank + number)]))
        world.report_failure(f"ValueError('on rank {world.rank}')")
        if world.rank == 0:
            time.sleep(1.5)  # the other is at its next call, and waits for this one
        world.drain()
        work.wait()
        step(world, number)
        seen += out.tolist()
    return seen


@pytest.mark.parametrize("per_host", [2, 1])
def test_ranks_that_failed_alike_go_on(pool: Pool, per_host: int) -> None:
    assert pool.run(2, fail_alike, per_host) == [[0.0, 1.0, 1.0, 2.0, 2.0, 3.0]] * 2


def fails_first() -> str:
    """Rank 0 launches more than rank 1 and then raises too: its own exception is what it gets."""
    world = World.connect("cpu")
    world.agree("backward", "")
    if world.rank == 0:
        time.sleep(0.5)
        world.all_gather(torch.empty(2), torch.zeros(1))
    world.report_failure(f"ValueError('on rank {world.rank}')")
    world.drain()
    return error_of(lambda: step(world, 1))


def test_draining_hides_no_exception(pool: Pool) -> None:
    for message in pool.run(2, fails_first):
        assert "ValueError('on rank 1')" in message


def refused(world: World) -> None:
    """What was refused was never begun: reporting it changes nothing."""
    odd = world.rank == 1
    error_of(lambda: world.agree("save" if odd else "load", ""))
    if odd:
        world.report_failure("DesyncError()")
    step(world, 1)


def test_a_refused_call_is_not_broken_off() -> None:
    run_ranks(2, refused)


def busy_for_long(per_host: int) -> list[str]:
    os.environ["ZEROFX_TIMEOUT_S"] = "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_POST_S", 0.2)
        patch.setattr(hosts, "_LOOK_S", 0.2)
        return _busy_for_long(spread(per_host))


def _busy_for_long(world: World) -> list[str]:
    step(world, 0)
    if world.rank == 1:
        with world.busy("compiling N"):
            time.sleep(3)
    step(world, 1)
    if world.rank == 1:
        time.sleep(3)
        return []
    return [error_of(lambda: step(world, 2))]


@pytest.mark.parametrize("per_host", [2, 1])
def test_the_limit_stands_still_while_a_rank_is_busy(pool: Pool, per_host: int) -> None:
    ((message,), _) = pool.run(2, busy_for_long, per_host)
    assert "did not arrive within" in message and "busy" not in message


def stopped_while_busy(world: World) -> str:
    """Rank 1 says that it is busy, and then gives no sign of life, as a stopped process."""
    if world.rank == 0:
        return error_of(lambda: step(world, 0))
    assert world._agreement is not None
    world._agreement.board.set_busy("compiling N")
    time.sleep(2)
    return ""


def test_a_busy_rank_that_gives_no_sign_of_life_is_not_waited_for() -> None:
    message, _ = run_ranks(2, stopped_while_busy, timeout_s=0.5)
    assert "rank 1, before its first call, busy compiling N, did not arrive within 0.5 s" in message


def killed_while_busy() -> str:
    world = World.connect("cpu")
    step(world, 0)
    if world.rank == 1:
        with world.busy("compiling N"):
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
    return error_of(lambda: step(world, 1))


def test_a_rank_killed_while_busy_is_named_at_once(pool: Pool) -> None:
    message, _ = pool.run(2, killed_while_busy, may_die=True)
    assert "rank 1, last at forward of program 3fa0 (call 1), busy compiling N, died" in message


def all_well(per_host: int) -> list[bool]:
    """What all ranks come to, and what only one of them does."""
    world = spread(per_host)
    found = [world.all_well("a look", True), world.all_well("a look", world.rank == 0)]
    found.append(world.all_well("a look", False))
    step(world, 0)  # they have stayed together
    world.report_failure("ValueError('on all')")
    found.append(world.all_well("a look", world.rank == 1))
    step(world, 1)
    if world.rank == 0:
        error_of(lambda: world.all_well("a look", False))
    else:
        error_of(lambda: world.agree("forward", "not well"))
    return found


@pytest.mark.parametrize("per_host", [2, 1])
def test_ranks_ask_whether_all_is_well(pool: Pool, per_host: int) -> None:
    for found in pool.run(2, all_well, per_host):
        assert found == [True, False, False, False]
