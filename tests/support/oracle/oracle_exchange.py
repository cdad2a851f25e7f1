"""Transfers between simulated ranks: who has launched what, when it is read, when it lands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from oracle_memory import OracleError
from torch import Tensor


class Delivery(Enum):
    """When a transfer reads its source, and when it writes its destination.

    A correct program gives the same bits under each of them.
    """

    EARLY = "early"  # both at the launch: whoever still reads the destination's memory is lost
    AT_WAIT = "at-wait"  # source at the launch, destination at the wait
    LATE = "late"  # both at the wait: whoever writes the source before that is found out


@dataclass
class Transfer:
    """One rank's part in one collective: what a launch returns, and only a wait can read.

    dest: what the wait returns. land: writes it, given what every rank sent.
    """

    number: int
    signature: tuple
    dest: Tensor | None
    sources: list[Tensor]
    land: Callable[[list[list[Tensor]]], None]
    sent: list[Tensor] | None = None
    has_landed: bool = False

    def send(self) -> None:
        """Read the source, once."""
        if self.sent is None:
            self.sent = [s.detach().clone() for s in self.sources]


@dataclass
class Exchange:
    """Every rank's transfers in the order of its launches; the n-th ones belong together."""

    world_size: int
    delivery: Delivery
    posted: list[list[Transfer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.posted = [[] for _ in range(self.world_size)]

    def post(
        self,
        rank: int,
        signature: tuple,
        dest: Tensor | None,
        sources: list[Tensor],
        land: Callable[[list[list[Tensor]]], None],
    ) -> Transfer:
        """Launch: record a rank's next collective.

        Raises:
            OracleError: another rank's collective of this number is a different one.
        """
        transfer = Transfer(len(self.posted[rank]), signature, dest, sources, land)
        for other, launched in enumerate(self.posted):
            if len(launched) > transfer.number:
                theirs = launched[transfer.number].signature
                if theirs != signature:
                    raise OracleError(
                        f"collective {transfer.number}: rank {rank} launches {signature}, "
                        f"rank {other} {theirs}"
                    )
        self.posted[rank].append(transfer)
        if self.delivery is not Delivery.LATE:
            transfer.send()
        return transfer

    def is_ready(self, transfer: Transfer) -> bool:
        """Say whether every rank has sent its part."""
        row = self._row(transfer.number)
        return len(row) == self.world_size and all(t.sent is not None for t in row)

    def land(self, transfer: Transfer) -> None:
        """Write the destination, once."""
        if not transfer.has_landed:
            transfer.has_landed = True
            parts = [t.sent for t in self._row(transfer.number)]
            transfer.land(parts)  # type: ignore[arg-type]

    def send_pending(self, rank: int | None = None) -> bool:
        """Send what was launched and not sent yet, of one rank or all; say whether there was any.

        A transfer needs nobody's wait to proceed: only when no rank can go on otherwise does the
        late delivery let it.
        """
        ranks = range(self.world_size) if rank is None else [rank]
        pending = [t for r in ranks for t in self.posted[r] if t.sent is None]
        for transfer in pending:
            transfer.send()
        return bool(pending)

    def check_landed(self, rank: int) -> None:
        """Refuse the end of a call while something is in flight: its memory is reused by then."""
        for transfer in self.posted[rank]:
            if not transfer.has_landed:
                raise OracleError(f"{transfer.signature} is still in flight at the end of its call")

    def check_finished(self) -> None:
        """Refuse an end at which some rank still misses a partner for its collective."""
        counts = [len(launched) for launched in self.posted]
        if len(set(counts)) > 1:
            raise OracleError(f"deadlock: the ranks launched {counts} collectives")

    def _row(self, number: int) -> list[Transfer]:
        return [launched[number] for launched in self.posted if len(launched) > number]


def concatenation(parts: list[list[Tensor]], ranks: range) -> Tensor:
    """Return what an all-gather over `ranks` delivers."""
    return torch.cat([parts[r][0] for r in ranks])


def scaled_sum(parts: list[Tensor], scale: float) -> Tensor:
    """Return scale * (((parts[0] + parts[1]) + parts[2]) + ...)."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total * scale
