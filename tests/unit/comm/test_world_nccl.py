"""The NCCL axis under fakes: what is launched, that the host never waits, what a hang leads to."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from zerofx.comm import nccl
from zerofx.comm.agreement import Agreement
from zerofx.comm.board import ROW_BYTES, MemoryBoard
from zerofx.comm.collectives import Lane
from zerofx.comm.nccl import NcclAxis
from zerofx.comm.watchdog import StreamWatchdog
from zerofx.errors import DesyncError


class FakeHandle:
    """A device-side transfer: `wait` orders streams and returns at once."""

    def __init__(self, land: Any) -> None:
        self.land, self.is_done = land, True

    def wait(self) -> None:
        self.land()

    def is_completed(self) -> bool:
        return self.is_done


class FakeGroup:
    """A group of two ranks of which the other always sends ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.handles: list[FakeHandle] = []
        self.is_aborted = False

    def launch(self, name: str, land: Any) -> FakeHandle:
        self.calls.append(name)
        self.handles.append(FakeHandle(land))
        return self.handles[-1]

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def axis(monkeypatch: pytest.MonkeyPatch) -> NcclAxis:
    def gather(group: FakeGroup, out: torch.Tensor, shard: torch.Tensor) -> FakeHandle:
        return group.launch("gather", lambda: out.copy_(torch.cat([shard, torch.ones(2)])))

    def scatter(group: FakeGroup, out: torch.Tensor, full: torch.Tensor) -> FakeHandle:
        return group.launch("scatter", lambda: out.copy_(full[:2] + 1))

    def reduce(buf: torch.Tensor, group: FakeGroup, async_op: bool) -> FakeHandle:
        assert async_op
        return group.launch("reduce", lambda: buf.add_(1))

    def broadcast(
        buf: torch.Tensor, group_src: int, group: FakeGroup, async_op: bool
    ) -> FakeHandle:
        assert async_op and group_src == 1
        return group.launch("broadcast", lambda: buf.fill_(1))

    def exchange(
        receives: list[torch.Tensor],
        sends: list[torch.Tensor],
        group: FakeGroup,
        async_op: bool,
    ) -> FakeHandle:
        assert async_op
        return group.launch("exchange", lambda: receives[1].copy_(sends[1] + 1))

    monkeypatch.setattr(nccl.dist, "all_to_all", exchange)
    monkeypatch.setattr(nccl, "all_gather_flat", gather)
    monkeypatch.setattr(nccl, "reduce_scatter_flat", scatter)
    monkeypatch.setattr(nccl, "group_backend", lambda group, device: group)
    monkeypatch.setattr(nccl.dist, "all_reduce", reduce)
    monkeypatch.setattr(nccl.dist, "broadcast", broadcast)
    memory = bytearray(3 * ROW_BYTES)
    boards = [MemoryBoard(memory, rank, 2) for rank in range(2)]
    for board in boards:
        board.attach()
    watchdog = StreamWatchdog(Agreement(boards[0], [0, 1], timeout_s=0.2))
    made = NcclAxis(0, 2, FakeGroup(), FakeGroup(), Lane(watchdog))
    watchdog.start(made.break_off)
    return made


def test_gathers_and_reduces_run_on_groups_of_their_own(axis: NcclAxis) -> None:
    out, shard = torch.zeros(4), torch.full((2,), 3.0)
    works = [axis.all_gather(out, shard), axis.reduce_scatter(shard.clone(), torch.ones(4), 1.0)]
    assert out.tolist() == [0, 0, 0, 0]
    for work in works:
        work.wait()
    assert out.tolist() == [3, 3, 1, 1]
    assert axis._gathers.calls == ["gather"] and axis._reduces.calls == ["scatter"]


def test_reductions_are_scaled_after_the_sum(axis: NcclAxis) -> None:
    part, buf, said = torch.zeros(2), torch.full((2,), 5.0), torch.zeros(2)
    axis.reduce_scatter(part, torch.full((4,), 3.0), 0.5).wait()
    axis.all_reduce(buf, 0.5).wait()
    axis.broadcast(said, 1).wait()
    assert part.tolist() == [2, 2] and buf.tolist() == [3, 3] and said.tolist() == [1, 1]


def test_an_all_to_all_is_one_call_of_the_reductions_group(axis: NcclAxis) -> None:
    receives, sends = ([torch.zeros(0), torch.full((2,), value)] for value in (0.0, 3.0))
    axis.all_to_all(receives, sends).wait()
    assert receives[1].tolist() == [4, 4] and axis._reduces.calls == ["exchange"]
    assert axis._lane.counters["all_to_all"].sent_bytes == 8


def test_a_stuck_transfer_is_aborted_and_named_at_the_next_launch(axis: NcclAxis) -> None:
    work = axis.all_gather(torch.zeros(4), torch.zeros(2), "all-gather of bucket 3 (blocks.0)")
    axis._gathers.handles[0].is_done = False
    work.wait()  # the host goes on
    deadline = time.monotonic() + 20
    while not axis._gathers.is_aborted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert axis._gathers.is_aborted and axis._reduces.is_aborted
    with pytest.raises(DesyncError, match=r"bucket 3 \(blocks.0\).*rank 1 .*has not arrived"):
        axis.all_gather(torch.zeros(4), torch.zeros(2))
