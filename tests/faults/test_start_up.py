"""A rank that never comes, dies or raises while a job starts up: the others raise, naming it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import start_cases
import torch.distributed as dist
from pool import Died, Pool
from start_cases import Fault, Seen
from torch import nn

import zerofx
from zerofx.comm import meeting
from zerofx.errors import DesyncError, PlanError

SLACK_S = 10.0


@contextlib.contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Have Ctrl-C pressed within the block, which is to end at once."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < after_s + SLACK_S


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A free port; where the store is served apart from the ranks, that store listens there."""
    names = request.fixturenames
    made_by = request.getfixturevalue("fault" if "fault" in names else "made_by")
    if getattr(made_by, "made_by", made_by) == "torchrun":
        store = dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False
        )
        yield store.port
        del store
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = probe.getsockname()[1]
    yield found


def check(pool: Pool, fault: Fault, port: int, folder: Path, limit_s: float) -> None:
    args = fault, limit_s, str(folder), port
    answers = pool.run(fault.size, start_cases.run, *args, timeout_s=90.0, may_die=True)
    odd = answers.pop(fault.odd)
    assert isinstance(odd, Died) == (fault.kind == "killed"), (str(fault), odd)
    for seen in answers:
        assert isinstance(seen, Seen), (str(fault), seen)
        assert f"rank {fault.odd}" in seen.message, (str(fault), seen)
        assert seen.after_s < limit_s + SLACK_S, (str(fault), seen)
        if fault.is_told:
            assert seen.after_s < limit_s, (str(fault), seen)
            assert seen.message.count("a fault") == (fault.kind == "raises"), (str(fault), seen)


SOME = [
    Fault("absent", "start", "user", 3, 2, 1),
    Fault("killed", "groups", "user", 1, 2, 1),
    Fault("raises", "plan", "torchrun", 3, 2, 0),
    Fault("exits", "weights", "user", 2, 2, 0),
]


@pytest.mark.parametrize("fault", SOME, ids=str)
def test_a_fault_at_start_up_is_over_soon_and_names_the_rank(
    pool: Pool, fault: Fault, port: int, tmp_path: Path
) -> None:
    check(pool, fault, port, tmp_path, 2.0)


@pytest.mark.parametrize("made_by", ["zerofx", "torchrun"])
def test_ranks_start_again_after_a_start_that_failed(pool: Pool, made_by: str, port: int) -> None:
    """Whichever of them refused its plan, and whichever came first."""
    for rank, said in enumerate(pool.run(2, start_cases.start_again, made_by, port)):
        for again, message in zip(start_cases.AGAIN, said, strict=True):
            others = f"DesyncError: rank {1 - rank}"
            kind = "PlanError" if rank in again.refusing else others
            assert message.startswith(kind), (again, message)
            assert "unknown plan field 'shape'" in message, (again, message)


# -- one rank alone -------------------------------------------------------------------------------
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is rank 1 of 2, and no process serves the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return monkeypatch


def test_ctrl_c_ends_the_wait_for_the_store(alone: pytest.MonkeyPatch) -> None:
    with interrupted(0.2):
        zerofx.compile(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "two"), ("RANK", "2"), ("WORLD_SIZE", "-2"), ("MASTER_PORT", "")]
)
def test_wrong_variables_are_named(alone: pytest.MonkeyPatch, name: str, value: str) -> None:
    alone.setenv(name, value)
    with pytest.raises(PlanError, match=f"{name} is {value!r}. It must be a whole number from"):
        zerofx.compile(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="unknown plan field 'shape'"):  # the user's error stays
        zerofx.compile(nn.Linear(2, 2), {"shape": 1})


class Stopped:
    """A store whose server was stopped: no request ever ends. It counts them."""

    num_requests = 0

    def set(self, *_: object) -> None:
        self.num_requests += 1
        threading.Event().wait(20)

    compare_set = set


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_LEAST_S", 0.1)
    store = Stopped()
    with interrupted(0.2):
        meeting.Meeting(meeting.BoundedStore(store, 60.0), 1, 2, 60.0).share("topic", "")
    alone = meeting.Meeting(meeting.BoundedStore(store, 0.2), 1, 2, 0.2)
    with pytest.raises(DesyncError, match=r"within 0\.2 s .* serves it \(rank 0"):
        alone.share("topic", "")
    alone.tell("nor is it asked again")
    assert store.num_requests == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("raises", "weights", "user", 3, 2, 0, has_hosts=True),
        Fault("exits", "agreement", "zerofx", 1, 2, 1, has_hosts=True),
        Fault("stopped", "meeting", "zerofx", 3, 2, 0),
        Fault("stopped", "agreement", "zerofx", 3, 2, 0),
    ],
    ids=str,
)
def test_another_host_or_a_stopped_server_is_not_waited_for(
    pool: Pool, fault: Fault, port: int, tmp_path: Path
) -> None:
    check(pool, fault, port, tmp_path, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", start_cases.all_faults()[::3], ids=str)
def test_every_fault_at_start_up_is_over_soon_and_names_the_rank(
    pool: Pool, fault: Fault, port: int, tmp_path: Path
) -> None:
    check(pool, fault, port, tmp_path, 10.0)  # three ranks beside other tests
