"""A rank that never comes, dies or raises while a job starts up: the others raise, naming it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import start_cases
import torch.distributed as dist
from pool import Died, Pool
from start_cases import Fault, Seen

SLACK_S = 10.0


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("raises", "weights", "user", 3, 2, 0, has_hosts=True),
        Fault("exits", "agreement", "zerofx", 1, 2, 1, has_hosts=True),
    ],
    ids=str,
)
def test_another_host_learns_of_a_fault(
    pool: Pool, fault: Fault, port: int, tmp_path: Path
) -> None:
    check(pool, fault, port, tmp_path, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", start_cases.all_faults(), ids=str)
def test_every_fault_at_start_up_is_over_soon_and_names_the_rank(
    pool: Pool, fault: Fault, port: int, tmp_path: Path
) -> None:
    check(pool, fault, port, tmp_path, 5.0)
