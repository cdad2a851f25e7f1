"""Ranks that are killed, stopped, gone or elsewhere: every other rank raises, naming them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import Died, Pool
from simulated import run_ranks

from zerofx.comm.differences import IF_RANK_0
from zerofx.comm.world import World
from zerofx.errors import DesyncError

LABEL = "all-gather of bucket 3 (blocks.0: w, b)"
QUICK_S = 20.0  # far below the timeouts these tests set, far above what raising takes


def error_of(run: Callable[[], object], limit_s: float = QUICK_S) -> str:
    """Return the message of the DesyncError that `run` raises before `limit_s`."""
    started = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        run()
    assert time.monotonic() - started < limit_s
    return without_places(str(caught.value))


def without_places(message: str) -> str:
    """Leave out which process, on which host, each rank of a message is."""
    return re.sub(r"([Rr]ank \d+) \((process \d+)?( ?on [^)]*)?\)", r"\1", message)


def step(world: World, number: int, label: str = LABEL) -> None:
    world.agree(f"forward of program 3fa{number}", "stage=3; params=12")
    out = torch.empty(2 * 4096)
    world.all_gather(out, torch.zeros(4096), label).wait()


def killed_between_calls() -> str:
    world = World.connect("cpu")
    step(world, 0)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: step(world, 1))


def killed_in_a_call() -> str:
    world = World.connect("cpu")
    world.agree("forward of program 3fa0", "")
    if world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    out = torch.empty(2 * 4096)
    first = error_of(lambda: world.all_gather(out, torch.zeros(4096), LABEL).wait())
    launched_anew = error_of(lambda: world.all_gather(out, torch.zeros(4096), LABEL).wait())
    another_call = error_of(lambda: world.agree("forward of program 3fa1", ""))
    world.drain()
    assert "rank 1" in launched_anew and "rank 1" in another_call
    return first


@pytest.mark.parametrize("body", [killed_between_calls, killed_in_a_call])
def test_a_killed_rank_is_named_at_once(pool: Pool, body: Callable[[], str]) -> None:
    message, dead = pool.run(2, body, may_die=True)
    assert dead == Died(-signal.SIGKILL)
    assert "rank 1, last at forward of program 3fa0 (call 1), died" in message
    assert ("call 2" in message) if body is killed_between_calls else (LABEL in message)


def stopped(where: str, mailbox: str) -> str:
    """Rank 1 stops itself; rank 0 wakes it once it has given up on it."""
    os.environ["ZEROFX_TIMEOUT_S"] = "1"
    world = World.connect("cpu")
    step(world, 0)
    if where == "in a call":
        world.agree("forward of program 3fa1", "")
    if world.rank == 1:
        with open(mailbox, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while not (os.path.exists(mailbox) and os.path.getsize(mailbox)):
            time.sleep(0.01)
    try:
        if where == "in a call":
            out = torch.empty(2 * 4096)
            return error_of(lambda: world.all_gather(out, torch.zeros(4096), LABEL).wait())
        return error_of(lambda: world.agree("forward of program 3fa1", ""))
    finally:
        if world.rank == 0:
            with open(mailbox) as file:
                os.kill(int(file.read()), signal.SIGCONT)


@pytest.mark.parametrize("where", ["between calls", "in a call"])
def test_a_stopped_rank_is_named_within_the_timeout(pool: Pool, where: str, tmp_path: Path) -> None:
    waiting, woken = pool.run(2, stopped, where, str(tmp_path / "pid"))
    assert "within 1 s (ZEROFX_TIMEOUT_S)" in waiting and "rank 1" in waiting
    if where == "in a call":
        assert f"rank 0 waits in {LABEL} of forward of program 3fa1 (call 2)" in waiting
        assert "rank 1 has not arrived" in waiting
    assert waiting.split(". ")[0] in woken  # it learns why the others stopped


def different_calls() -> list[str]:
    world = World.connect("cpu")
    step(world, 0)
    errors = [
        error_of(lambda: world.agree(("forward of program 3fa2", "state_dict")[world.rank], "")),
        error_of(lambda: world.agree("forward", f"stage={3 - world.rank}; params=12; torch=2")),
    ]
    step(world, 3)  # nothing was launched: the ranks may go on
    return errors


def test_ranks_about_to_differ_are_named_with_the_difference(pool: Pool) -> None:
    for calls, digests in pool.run(2, different_calls):
        assert calls.startswith(
            "rank 1 is about to run state_dict (call 2) while rank 0 runs forward of program 3fa2"
        )
        assert digests.startswith(
            "rank 1 is about to run forward (call 3) with stage=2 while rank 0 runs forward with "
            "stage=3"
        )


def one_batch_fewer() -> str:
    world = World.connect("cpu")
    step(world, 0)
    if world.rank == 1:
        world.leave("its data ended")
        return ""
    return error_of(lambda: step(world, 1))


def forgets_the_world() -> str:
    world = World.connect("cpu")
    step(world, 0)
    if world.rank == 1:
        del world
        return ""
    return error_of(lambda: step(world, 1))


def test_a_rank_that_left_is_named(pool: Pool) -> None:
    assert (
        "rank 1, last at forward of program 3fa0 (call 1), has left (its data ended)"
        in (pool.run(2, one_batch_fewer)[0])
    )
    ended = pool.run(2, forgets_the_world)[0]
    assert "has left (its process ended, or its model was deleted)" in ended
    assert ended.endswith(f"(call 2). {IF_RANK_0}")


def gives_up_in_a_call() -> str:
    """Rank 1 raises in mid-call, catches it, and comes back with another call."""
    world = World.connect("cpu")
    world.agree("forward of program 3fa0", "")
    if world.rank == 1:
        time.sleep(0.5)
        return error_of(lambda: world.agree("evaluation of program 77", ""))
    out = torch.empty(2 * 4096)
    return error_of(lambda: world.all_gather(out, torch.zeros(4096), LABEL).wait())


def test_a_rank_gone_on_to_another_call_is_named_in_mid_call(pool: Pool) -> None:
    for message in pool.run(2, gives_up_in_a_call):
        assert message.startswith(
            "rank 1 is about to run evaluation of program 77 (call 2) while rank 0 waits in "
            f"{LABEL} of forward of program 3fa0 (call 1)"
        )


def three_ranks(world: World) -> str:
    what = "state_dict" if world.rank == 2 else "forward of program 3fa0"
    return error_of(lambda: world.agree(what, ""))


def test_the_odd_rank_out_is_named_on_every_rank() -> None:
    expected = "rank 2 is about to run state_dict (call 1) while ranks 0, 1 run forward of program"
    assert all(message.startswith(expected) for message in run_ranks(3, three_ranks))


def never_comes(world: World) -> str:
    if world.rank == 1:
        time.sleep(1.0)
        return ""
    return error_of(lambda: world.agree("forward", ""))


def test_a_late_rank_is_named_with_the_limit() -> None:
    message, _ = run_ranks(2, never_comes, timeout_s=0.3)
    assert "rank 1, before its first call, did not arrive within 0.3 s" in message


def raises_alone(world: World) -> None:
    world.agree("forward", "")
    if world.rank == 1:
        raise ValueError("a user's mistake")
    world.all_gather(torch.empty(4), torch.zeros(2)).wait()


def test_the_first_error_of_a_simulated_rank_is_the_one_raised() -> None:
    with pytest.raises(ValueError, match="a user's mistake"):
        run_ranks(2, raises_alone)


def other_collectives(world: World) -> None:
    work = world.all_reduce(torch.zeros(4)) if world.rank else world.broadcast(torch.zeros(4))
    work.wait()


def test_simulated_ranks_in_different_collectives_are_told() -> None:
    with pytest.raises(DesyncError, match=r"runs \('(all-reduce|broadcast)'"):
        run_ranks(2, other_collectives)
