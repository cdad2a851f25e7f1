"""Collectives: the interface that every kind of axis implements, and Work in flight.

Reductions sum in rank order, ((r0 + r1) + r2) + ..., and scale once at the end (except on NCCL,
which sums in an order fixed by the topology), so that the way bytes are moved never changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from zerofx.comm.mail import Transfer, check_memory
from zerofx.errors import DesyncError
from zerofx.policy import exchange
from zerofx.policy.borrowing import Scratch

STRETCH_BYTES = 256 << 10  # part of a sum: well within the second-level cache of one core
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")  # in graphs of programs
COUNTED = (*KINDS, "all_to_all", "send")


@dataclass(slots=True)
class Traffic:
    """Counters of what this rank has sent in collectives of one kind.

    across_bytes: the part of `sent_bytes` that went to ranks on other hosts.
    """

    calls: int = 0
    sent_bytes: int = 0
    across_bytes: int = 0


class Work:
    """A collective in flight: once `wait` returns, its output is ready and its input may change."""

    __slots__ = ()

    def wait(self) -> None:
        """Finish the collective; waiting again does nothing."""


DONE = Work()


class Watch(Protocol):
    """An object that numbers launches and watches a waiting rank (see comm/watchdog.py)."""

    waited_s: float

    def launched(self, handles: Sequence[Any], label: str) -> int: ...
    def wait(self, handles: Sequence[Any], number: int, label: str) -> None: ...
    def explain(self, number: int, label: str, error: RuntimeError) -> DesyncError: ...


@dataclass(slots=True)
class Lane:
    """The state that the axes of one world share: watch, counters, and collectives in flight."""

    watch: Watch
    counters: dict[str, Traffic] = field(default_factory=lambda: {k: Traffic() for k in COUNTED})
    in_flight: dict[Work, None] = field(default_factory=dict)

    def count(self, kind: str, sent_bytes: int, across_bytes: int = 0) -> None:
        traffic = self.counters[kind]
        traffic.calls += 1
        traffic.sent_bytes += sent_bytes
        traffic.across_bytes += across_bytes


class Axis:
    """One axis of ranks with its collectives; this base class is an axis of one rank (copies).

    elsewhere: the ranks of the axis that are on other hosts than this one.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, elsewhere: frozenset[int] = frozenset()
    ) -> None:
        self.rank = rank
        self.size = size
        self.elsewhere = elsewhere

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        """Fill `out` [size * k] with every rank's `shard` [k], in rank order."""
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return DONE

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        """Set `out` [k] to scale * the sum over ranks of this rank's slice of `full` [size * k]."""
        if scale != 1.0:
            torch.mul(full, scale, out=out)
        elif out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return DONE

    def all_reduce(
        self,
        buf: Tensor,
        scale: float = 1.0,
        label: str = "all-reduce",
        source: Tensor | None = None,
    ) -> Work:
        """Set `buf` [n] to scale * the sum over ranks of `source`, by default of `buf` itself."""
        return self.reduce_scatter(buf, buf if source is None else source, scale, label)

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        """Set `buf` on every rank to its value on rank `src` of this axis."""
        return DONE

    def all_to_all(
        self, receives: Sequence[Tensor], sends: Sequence[Tensor], label: str = "all-to-all"
    ) -> Work:
        """Send `sends[r]` to each rank r of this axis, and fill `receives[r]` with r's message.

        Sizes may differ between pairs of ranks; both ranks of a pair must know them. Empty tensors
        are not sent.
        """
        receives[0].copy_(sends[0])
        return DONE

    def send(self, buf: Tensor, to: int, label: str = "send") -> Work:
        """Send `buf` to rank `to` of this axis, which receives the same number of bytes."""
        raise AssertionError(f"{label}: an axis of one rank sends nothing.")

    def receive(self, buf: Tensor, source: int, label: str = "receive") -> Work:
        """Fill `buf` with the next message of its size from rank `source` of this axis."""
        raise AssertionError(f"{label}: an axis of one rank receives nothing.")

    def shift(self, landing: Tensor, leaving: Tensor, label: str = "shift") -> Work:
        """Send `leaving` to the next rank, and fill `landing` with the previous rank's.

        The last rank sends to the first. Both tensors have the same size on all ranks.
        """
        landing.copy_(leaving)
        return DONE

    def rest(self, frees: Callable[[int], bool]) -> None:
        """Free the receive buffers that no collective uses and for whose bytes `frees` holds."""


class GroupWork(Work):
    """A collective over process groups: its transfers, and the work left for this rank."""

    __slots__ = ("_finish", "_handles", "_label", "_lane", "_number")

    def __init__(
        self,
        lane: Lane,
        label: str,
        handles: list[Any],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._lane = lane
        self._handles = handles
        self._finish = finish
        self._label = label
        self._number = lane.watch.launched(handles, label)
        lane.in_flight[self] = None

    def wait(self) -> None:
        """Wait for the transfers, then sum and scale.

        Raises:
            DesyncError: a rank left, died, runs another call or did not arrive in time; names it.
        """
        lane = self._lane
        if self not in lane.in_flight:
            return
        del lane.in_flight[self]
        try:
            lane.watch.wait(self._handles, self._number, self._label)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: what still arrives must not be written into later
            if all(isinstance(handle, Transfer) for handle in self._handles):
                lane.in_flight[self] = None
            raise
        if self._finish is not None:
            self._finish()


def receive_buffers(device: torch.device) -> Scratch[Tensor]:
    """Return buffers on a device that reductions borrow in turn."""

    def make(numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # the buffer outlives the mode of its first borrower
            made = torch.empty(numel, dtype=dtype, device=device)
        check_memory(made)  # a buffer without memory would be reused by later collectives
        return made

    return Scratch(make)


def ordered_sum(parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """Set `out` to scale * (((parts[0] + parts[1]) + parts[2]) + ...).

    `out` may alias the first or the second part, but no later one. Long parts are summed in
    stretches, so that the second and later passes find their data in the cache.
    """
    numel = out.numel()
    step = max(STRETCH_BYTES // out.element_size(), 1)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        is_whole = stop - start == numel
        own, *others = (out, *parts) if is_whole else (t[start:stop] for t in (out, *parts))
        torch.add(others[0], others[1], out=own)
        for part in others[2:]:
            own.add_(part)
        if scale != 1.0:
            own.mul_(scale)


def all_reduce_bytes(buf: Tensor, rank: int, size: int) -> int:
    """Return the bytes that `rank` sends to reduce a buffer over `size` ranks."""
    return exchange.all_reduce_sent(buf.numel(), rank, size) * buf.element_size()
