"""Copies between device, host and NVMe in the oracle: values that are out of reach while away."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from oracle_exchange import Delivery
from oracle_memory import OracleError, poison
from torch import Tensor


@dataclass(eq=False)
class Parked:
    """A place on the host, or in a file: nothing but the ops that move values can make use of it.

    A place on the host is lent to one value, so it is empty once that has gone on. One in a file
    may be read again.
    """

    is_file: bool = False
    content: Tensor | None = None


@dataclass(eq=False)
class HostCopy:
    """A copy under way: of `x`, or of what another place holds, to the place; or, where there is
    neither, from the place to the device.
    """

    place: Parked
    x: Tensor | None
    source: Parked | None = None
    arrived: Tensor | None = None
    has_landed: bool = False

    def move(self) -> None:
        """Read the source, once; later changes of it are not seen."""
        if self.arrived is None:
            held = (self.source or self.place).content
            source = held if self.x is None else self.x
            if source is None:
                raise OracleError("a copy of a place off the device that holds nothing")
            self.arrived = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
            self.arrived.copy_(source)


@dataclass
class Host:
    """One rank's copies. What has left is garbage on the device once its copy has ended, and a
    place on the host is free, and empty, once its value is back.
    """

    under_way: list[HostCopy] = field(default_factory=list)

    def launch(self, copy: HostCopy, delivery: Delivery) -> HostCopy:
        self.under_way.append(copy)
        if delivery is not Delivery.LATE:
            copy.move()
        return copy

    def finish(self, copy: HostCopy) -> Tensor | Parked:
        """Wait for a copy: hand out what arrived, and destroy its source."""
        if copy.has_landed:
            raise OracleError("a copy to or from the host is waited for twice")
        copy.move()
        copy.has_landed = True
        self.under_way.remove(copy)
        if copy.x is None and copy.source is None:
            copy.place.content = None
            return copy.arrived  # type: ignore[return-value]
        copy.place.content = copy.arrived
        if copy.x is not None:
            _destroy(copy.x)
        elif copy.source is not None and not copy.source.is_file:
            copy.source.content = None
        return copy.place

    def check_landed(self) -> None:
        """Refuse the end of a call while something is under way."""
        if self.under_way:
            raise OracleError("a copy to or from the host is never waited for")


def _destroy(x: Tensor) -> None:
    """Fill all memory that a tensor lies in with garbage: its views lie there too."""
    poison(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()))
