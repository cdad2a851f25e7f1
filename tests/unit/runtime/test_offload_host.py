"""The host tier: places lent and taken back; copies on streams, ordered by events alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx.runtime.tiers import host_tier as copy_lanes
from zerofx.runtime.tiers.host_tier import HostTier, InlineLane, Moved, StreamLane, dense_bytes

CPU = torch.device("cpu")


def test_a_value_comes_back_as_it_was() -> None:
    host = HostTier(CPU, poison=True)
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(()), torch.arange(5),
              torch.rand(2, 3) > 0.5, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
              torch.randn(7).bfloat16(), torch.randn(3, dtype=torch.complex64)):  # fmt: skip
        before = x.clone()
        away = host.offload(x).wait()
        back = host.reload(away).wait()
        assert torch.equal(back, before)
        assert (back.stride(), back.dtype) == (before.stride(), before.dtype)
        assert not x.is_floating_point() or x.isnan().all()
        del away
    assert host.num_lent == 0


def test_places_are_lent_while_somebody_holds_them() -> None:
    host = HostTier(CPU)
    first, second = (host.offload(torch.randn(8)).wait() for _ in range(2))
    assert (host.num_lent, host.nbytes) == (2, 64)
    address, view = first.data_ptr(), first[2:]
    del first
    assert host.num_lent == 1, "a place is lent to a value, not to views of it"
    third = host.offload(torch.randn(4)).wait()
    assert (third.data_ptr(), host.nbytes) == (address, 64), "the smallest place that fits"
    larger = host.offload(torch.randn(100)).wait()
    assert (host.num_lent, host.nbytes) == (3, 464)
    del third, second, larger, view
    largest = host.offload(torch.randn(1000)).wait()
    assert (host.num_lent, host.nbytes) == (1, 4064), "instead of the largest free one"
    del largest


def test_bytes_are_counted_by_direction() -> None:
    host = HostTier(CPU)
    away = host.offload(torch.randn(10)).wait()
    for _ in range(2):
        host.reload(away).wait()
    assert (host.moved["d2h"], host.moved["h2d"]) == (Moved(1, 40), Moved(2, 80))
    assert dense_bytes(torch.randn(4, 3).t()) == 48


def test_a_source_is_held_until_its_wait() -> None:
    host = HostTier(CPU, poison=True)
    x = torch.ones(4)
    copy = host.offload(x)
    assert torch.equal(x, torch.ones(4))
    host.drain()
    assert x.isnan().all() and copy.tensor is None
    assert host.num_lent == 0, "an exception leaves nothing behind"


def test_a_second_wait_is_a_bug() -> None:
    copy = HostTier(CPU).offload(torch.ones(4))
    copy.wait()
    with pytest.raises(AssertionError, match="already waited for"):
        copy.wait()


# -- streams, without a GPU -----------------------------------------------------------------------
class FakeStream:
    """Notes what is queued on it; nothing runs until `flow`."""

    log: list[tuple[str, Any]]

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, f"behind {other.name}"))

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, f"behind {event}"))

    def record_event(self) -> str:
        event = f"{self.name} {sum(what == 'copy' for _, what in self.log)}"
        self.log.append((self.name, f"event {event}"))
        return event


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Put fakes in the place of CUDA's streams; return what is queued where."""
    import contextlib

    log: list[tuple[str, Any]] = []
    names = iter(["down", "up"])
    compute, current = FakeStream("compute", log), []

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Any:
        current.append(stream)
        yield
        current.pop()

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if current:
            assert non_blocking
            log.append((current[-1].name, "copy"))
        return real(self, source)

    real = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(copy_lanes.torch.cuda, "Stream", lambda _: FakeStream(next(names), log))
    monkeypatch.setattr(copy_lanes.torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(copy_lanes.torch.cuda, "stream", on)
    return log


def test_streams_are_ordered_by_events(log: list[tuple[str, Any]]) -> None:
    """The host never waits; each copy stands behind the compute, and behind the last of its place.

    The third copy takes the place of the first while its way back may still be under way.
    """
    host = HostTier(CPU, lanes=(StreamLane(CPU), StreamLane(CPU)))
    leaving = host.offload(torch.ones(4))
    assert log == [("down", "behind compute"), ("down", "copy"), ("down", "event down 1")]
    log.clear()
    away = leaving.wait()
    assert log == [("compute", "behind down 1")]
    log.clear()
    returning = host.reload(away)
    assert log == [("up", "behind compute"), ("up", "behind down 1"), ("up", "copy"),
                   ("up", "event up 1")]  # fmt: skip
    log.clear()
    del away
    assert host.num_lent == 1, "held by the copy"
    returning.wait()
    assert log == [("compute", "behind up 1")] and host.num_lent == 0
    log.clear()
    host.offload(torch.ones(4))
    assert ("down", "behind up 1") in log and log[-2] == ("down", "copy")


def test_an_exception_orders_the_compute_behind_what_is_under_way(
    log: list[tuple[str, Any]],
) -> None:
    host = HostTier(CPU, lanes=(StreamLane(CPU), StreamLane(CPU)))
    copies = [host.offload(torch.ones(4)) for _ in range(2)]
    log.clear()
    host.drain()
    assert [where for where, _ in log] == ["compute", "compute"]
    assert all(c.tensor is None for c in copies)


def test_a_cpu_copies_inline() -> None:
    lanes = copy_lanes.lanes_for(CPU)
    assert all(isinstance(lane, InlineLane) for lane in lanes)
    out = torch.zeros(2)
    assert lanes[0].copy(out, torch.ones(2), None) is None
    assert torch.equal(out, torch.ones(2))
