"""Messages between memories: order, sizes, full sockets, lost processes, and gloo instead."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Died, Pool
from torch import Tensor
from world_cases import assert_bit_equal, every_collective

from zerofx.comm import mail
from zerofx.comm.mail import MemoryWire
from zerofx.comm.world import World
from zerofx.compat.graphs import FakeTensorMode
from zerofx.errors import DesyncError, PlanError, ShardError

LIMIT = timedelta(seconds=30)
SHORT, LONG = mail._SHORT // 4, 1 << 20  # numbers of floats


def wire_of(world: World) -> MemoryWire:
    wire = world._shard._gather_wire  # type: ignore[attr-defined]
    assert isinstance(wire, MemoryWire)
    return wire


def message(number: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float32) + 1000 * number


SIZES = [1, SHORT, SHORT + 1, LONG, 7, LONG, SHORT]


def sends_before_it_receives() -> list[bool]:
    """Each rank sends everything before it looks for anything, and takes the last sizes first."""
    world = World.connect("cpu")
    wire, other = wire_of(world), 1 - world.rank
    sent = [wire.send([message(n, numel)], other, numel) for n, numel in enumerate(SIZES)]
    landings = {n: torch.empty(numel) for n, numel in enumerate(SIZES)}
    later = {n: SIZES.index(SIZES[n]) != n for n in landings}  # the second one of its size
    order = sorted(landings, key=lambda n: (-SIZES[n], later[n]))
    received = [wire.recv([landings[n]], other, SIZES[n]) for n in order]
    for transfer in reversed([*sent, *received]):
        transfer.wait(LIMIT)
    return [torch.equal(landings[n], message(n, SIZES[n])) for n in landings]


def test_messages_of_one_size_keep_their_order_and_others_do_not_wait(pool: Pool) -> None:
    assert pool.run(2, sends_before_it_receives) == [[True] * len(SIZES)] * 2


def floods(count: int) -> tuple[bool, float]:
    """Both ranks send more short messages than a socket holds before either receives one."""
    world = World.connect("cpu")
    wire, other = wire_of(world), 1 - world.rank
    sent = [wire.send([message(n, SHORT)], other, 1) for n in range(count)]
    landings = [torch.empty(SHORT) for _ in range(count)]
    received = [wire.recv([landing], other, 1) for landing in landings]
    for transfer in (*sent, *received):
        transfer.wait(LIMIT)
    unsent = sum(len(peer._unsent) for peer in wire._peers if peer is not None)
    return all(torch.equal(x, message(n, SHORT)) for n, x in enumerate(landings)), unsent


def test_messages_that_a_socket_has_no_room_for_wait(pool: Pool) -> None:
    assert pool.run(2, floods, 200) == [(True, 0)] * 2


def serves_while_it_waits() -> bool:
    """Rank 0 waits for rank 2, which comes only after rank 1's message has left for rank 0."""
    world = World.connect("cpu")
    wire, out = wire_of(world), torch.empty(LONG)
    if world.rank == 0:
        first = wire.recv([out], 1, 5)
        wire.recv([torch.empty(4)], 2, 6).wait(LIMIT)
        return first.is_completed() and torch.equal(out, message(3, LONG))
    if world.rank == 1:
        wire.send([message(3, LONG)], 0, 5).wait(LIMIT)  # until rank 0 has copied it
        wire.send([torch.ones(1)], 2, 7).wait(LIMIT)
        return True
    wire.recv([torch.empty(1)], 1, 7).wait(LIMIT)
    wire.send([torch.ones(4)], 0, 6).wait(LIMIT)
    return True


def test_a_rank_that_waits_takes_other_messages(pool: Pool) -> None:
    assert pool.run(3, serves_while_it_waits) == [True] * 3


def two_threads_receive() -> bool:
    world = World.connect("cpu")
    wire, other = wire_of(world), 1 - world.rank
    landings = [torch.empty(LONG) for _ in range(2)]

    def take(n: int) -> None:
        wire.recv([landings[n]], other, n).wait(LIMIT)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    sent = [wire.send([message(n, LONG)], other, n) for n in (1, 0)]
    for thread in threads:
        thread.join()
    for each in sent:
        each.wait(LIMIT)
    return all(torch.equal(x, message(n, LONG)) for n, x in enumerate(landings))


def test_threads_may_wait_at_once(pool: Pool) -> None:
    assert pool.run(2, two_threads_receive) == [True, True]


def takes_anothers_message(lag_s: float) -> float:
    """A thread copies a long message of another thread, which begins to wait meanwhile."""
    world = World.connect("cpu")
    wire, other = wire_of(world), 1 - world.rank
    if world.rank == 1:
        wire.recv([torch.empty(1)], 0, 1).wait(LIMIT)
        time.sleep(0.1)
        wire.send([torch.ones(30_000_000)], 0, 2).wait(LIMIT)
        wire.recv([torch.empty(1)], 0, 3).wait(LIMIT)
        wire.send([torch.ones(1)], 0, 4).wait(LIMIT)
        return 0.0
    long, took = wire.recv([torch.empty(30_000_000)], other, 2), []

    def waits_for_the_long_one() -> None:
        time.sleep(0.1 + lag_s)
        began = time.monotonic()
        long.wait(LIMIT)
        took.append(time.monotonic() - began)
        wire.send([torch.ones(1)], 1, 3).wait(LIMIT)

    threads = [
        threading.Thread(target=lambda: wire.recv([torch.empty(1)], other, 4).wait(LIMIT)),
        threading.Thread(target=waits_for_the_long_one),
    ]
    threads[0].start()
    time.sleep(0.02)
    wire.send([torch.ones(1)], other, 1)
    threads[1].start()
    for thread in threads:
        thread.join()
    return took[0]


@pytest.mark.parametrize("lag_s", [0.0, 0.012])
def test_a_thread_whose_message_another_one_takes_wakes_up(pool: Pool, lag_s: float) -> None:
    assert max(pool.run(2, takes_anothers_message, lag_s)) < 20


class Interrupt(BaseException):
    """What a signal raises, such as Ctrl-C."""


def is_interrupted(flag: str) -> list[float]:
    """Rank 0 is interrupted in a wait, ends the call, and uses the buffer for something else."""
    world = World.connect("cpu")
    wire, other = wire_of(world), 1 - world.rank
    world.agree("forward", "x")
    out = torch.zeros(2 * LONG)

    def interrupt(*_: object) -> None:
        raise Interrupt

    if world.rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        work = world.all_gather(out, torch.ones(LONG))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupt):
            work.wait()
        signal.signal(signal.SIGALRM, before)
        Path(flag).touch()
        with contextlib.suppress(DesyncError):
            world.drain()
        out.fill_(7.0)
    else:
        while not Path(flag).exists():
            time.sleep(0.01)
        with contextlib.suppress(DesyncError):
            world.all_gather(out, torch.ones(LONG)).wait()
    with contextlib.suppress(RuntimeError):  # serves the sockets: a message left over would land
        sent = wire.send([torch.ones(1)], other, 9)
        wire.recv([torch.empty(1)], other, 9).wait(LIMIT)
        sent.wait(LIMIT)
    return out.unique().tolist()


def test_after_an_interrupted_wait_nothing_is_written_late(pool: Pool, tmp_path: Path) -> None:
    values, _ = pool.run(2, is_interrupted, str(tmp_path / "flag"))
    assert values == [7.0]
    pool.renew()


def breaks_after_a_broadcast() -> list[float | str]:
    """A call fails on rank 0 after its broadcast, on rank 1 before it; both go on."""
    os.environ["ZEROFX_TIMEOUT_S"] = "5"
    world = World.connect("cpu")
    got: list[float | str] = []
    for number in range(3):
        try:
            world.agree("forward", "x")
            if number == 0 and world.rank == 1:
                raise ValueError("bad batch")
            box = torch.full((8,), float(number) if world.rank == 0 else -1.0)
            world.broadcast(box, 0, "seed").wait()
            if number == 0:
                raise ValueError("bad batch")
            got.append(box[0].item())
        except ValueError as error:
            world.report_failure(repr(error))
            world.drain()
        except DesyncError as error:
            return [str(error)]
    return got


def test_a_message_of_a_broken_call_is_not_taken_for_another(pool: Pool) -> None:
    answers = pool.run(2, breaks_after_a_broadcast)
    assert all("after ValueError('bad batch')" in str(told) for (told,) in answers)
    pool.renew()


def of_other_sizes() -> str:
    """Sizes whose tags are equal by chance, as above 1 GiB."""
    world = World.connect("cpu")
    wire = wire_of(world)
    if world.rank == 1:
        wire.send([torch.ones(8)], 0, 1)
        return ""
    with pytest.raises(RuntimeError) as caught:
        wire.recv([torch.ones(16)], 1, 1).wait(LIMIT)
    return str(caught.value)


def test_a_message_of_another_size_is_refused(pool: Pool) -> None:
    assert "sent 32 bytes for 64" in pool.run(2, of_other_sizes)[0]
    pool.renew()


def without_memory(transport: str) -> list[str]:
    """Launch collectives on fake tensors, whose address is 0; the next ones run as before."""
    os.environ[mail.VARIABLE] = transport
    try:
        world = World.connect("cpu")
    finally:
        os.environ.pop(mail.VARIABLE)
    axis, peer = world.axis("shard"), 1 - world.rank
    said = []
    with FakeTensorMode():
        fake, both = torch.empty(8), torch.empty(16)
    launches: list[Callable[[], Any]] = [
        lambda: axis.all_gather(both, fake),
        lambda: axis.all_gather(torch.empty(16), fake),
        lambda: axis.all_gather(both, torch.empty(8)),
        lambda: axis.send(fake, peer),
        lambda: axis.receive(fake, peer),
        lambda: axis.shift(fake, torch.empty(8)),
    ]
    if transport == "memory":
        launches.append(lambda: wire_of(world).recv([fake], peer, 1))
    for launch in launches:
        with pytest.raises(ShardError) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the address of a fake tensor
            launch()
        said.append(str(caught.value))
    found = torch.empty(2)
    axis.all_gather(found, torch.full((1,), float(world.rank))).wait()
    assert found.tolist() == [0.0, 1.0]
    return said


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_a_tensor_without_memory_is_refused_before_anything_is_sent(
    pool: Pool, transport: str
) -> None:
    pool.renew()
    for said in pool.run(2, without_memory, transport):
        assert all("that has no memory" in each for each in said)


def forks() -> bool:
    """A child that has messages of its own leaves those of its parent alone."""
    world = World.connect("cpu")
    wire, other = wire_of(world), 1 - world.rank
    if world.rank == 0 and (child := os.fork()) == 0:
        ours, theirs = mail.socket.socketpair(mail.socket.AF_UNIX, mail.socket.SOCK_SEQPACKET)
        peer = mail._Peer(0, os.getpid(), ours)
        mail._OFFICE.open(peer)
        try:
            mail._OFFICE.receive(peer, torch.empty(1), 0, 1).wait(timedelta(seconds=0.8))
        finally:
            theirs.close()
            os._exit(0)
    if world.rank == 1:
        time.sleep(0.4)
        wire.send([message(1, LONG)], 0, 1).wait(LIMIT)
        return True
    out = torch.empty(LONG)
    wire.recv([out], other, 1).wait(LIMIT)
    os.waitpid(child, 0)
    return torch.equal(out, message(1, LONG))


def test_a_forked_child_does_not_take_messages(pool: Pool) -> None:
    assert pool.run(2, forks) == [True, True]


def is_killed() -> tuple[str, float]:
    world = World.connect("cpu")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        wire_of(world).recv([torch.empty(LONG)], 1, 1).wait(LIMIT)
    return str(caught.value), time.monotonic() - began


def test_the_end_of_a_process_is_noticed_at_once(pool: Pool) -> None:
    (told, took), dead = pool.run(2, is_killed, may_die=True)
    assert dead == Died(-signal.SIGKILL)
    assert "closed the connection" in told and took < 5


def leaves_early() -> bool:
    """Rank 1 ends its world with a message on its way that rank 0 has not looked at."""
    world = World.connect("cpu")
    wire, out = wire_of(world), torch.empty(SHORT)
    if world.rank == 1:
        wire.send([message(1, SHORT)], 0, 1).wait(LIMIT)
        for peer in wire._peers:
            if peer is not None:
                peer.close()
        return True
    time.sleep(0.3)
    wire.recv([out], 1, 1).wait(LIMIT)
    return torch.equal(out, message(1, SHORT))


def test_the_last_messages_of_a_rank_that_ends_arrive(pool: Pool) -> None:
    assert pool.run(2, leaves_early) == [True, True]
    pool.renew()


def breaks_off() -> str:
    """A thread of rank 0 breaks off, as a watchdog does, while both ranks wait."""
    world = World.connect("cpu")
    wire = wire_of(world)
    if world.rank == 0:
        threading.Timer(0.3, wire._mail.break_off).start()
    with pytest.raises(RuntimeError) as caught:
        wire.recv([torch.empty(LONG)], 1 - world.rank, 1).wait(LIMIT)
    return str(caught.value)


def test_a_wait_can_be_broken_off(pool: Pool) -> None:
    here, there = pool.run(2, breaks_off)
    assert "closed the connection" in here and "gave up" in there
    pool.renew()


def over(transport: str | None, unreadable: int | None) -> tuple[Any, str]:
    """Run every collective; `unreadable` cannot read the others' memory."""
    reads = mail._READ
    if transport is not None:
        os.environ[mail.VARIABLE] = transport
    if int(os.environ.get("RANK", -1)) == unreadable or unreadable == -1:
        mail._READ = lambda *args: -1
    try:
        world = World.connect("cpu")
        return every_collective(world), type(world._shard._gather_wire).__name__  # type: ignore[attr-defined]
    finally:
        mail._READ = reads
        os.environ.pop(mail.VARIABLE, None)


@pytest.mark.parametrize(
    ("transport", "unreadable", "wire"),
    [
        (None, None, "MemoryWire"),
        ("memory", None, "MemoryWire"),
        ("gloo", None, "ProcessGroupGloo"),
        (None, -1, "ProcessGroupGloo"),
    ],
)
def test_what_carries_messages_changes_no_bit(
    pool: Pool, transport: str | None, unreadable: int | None, wire: str
) -> None:
    pool.renew()  # groups of ended worlds keep their connections
    answers = pool.run(2, over, transport, unreadable)
    assert_bit_equal([got for got, _ in answers], 2, 2)
    assert [name for _, name in answers] == [wire] * 2


def one_rank_cannot(what: str) -> tuple[str, float]:
    """Rank 1 cannot read memory, or make a socket."""
    began = time.monotonic()
    if torch.distributed.get_rank() == 1:
        if what == "read":
            mail._READ = lambda *args: -1
        else:
            mail._socket = refused
    world = World.connect("cpu")
    took = time.monotonic() - began
    return type(world._shard._gather_wire).__name__, took  # type: ignore[attr-defined]


def refused() -> Any:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("what", ["read", "listen"])
def test_one_rank_that_cannot_sends_all_to_gloo_at_once(pool: Pool, what: str) -> None:
    pool.renew()
    answers = pool.run(2, one_rank_cannot, what)
    assert all(name == "ProcessGroupGloo" and took < 10 for name, took in answers)
    pool.renew()


def of_unknown_name() -> str:
    os.environ[mail.VARIABLE] = "shared"
    with pytest.raises((PlanError, DesyncError)) as caught:
        World.connect("cpu")
    return str(caught.value)


def test_an_unknown_transport_is_refused(pool: Pool) -> None:
    pool.renew()
    told = pool.run(2, of_unknown_name)
    said = "ZEROFX_TRANSPORT is 'shared'. Set it to 'memory' or 'gloo'"
    assert any(said in text for text in told)
    pool.renew()


def test_only_the_expected_process_is_accepted() -> None:
    ours, theirs = mail.socket.socketpair(mail.socket.AF_UNIX, mail.socket.SOCK_SEQPACKET)
    with ours, theirs:
        mail._check_process(ours, os.getpid())
        with pytest.raises(OSError, match=f"process {os.getpid()} of user"):
            mail._check_process(ours, os.getpid() + 1)
