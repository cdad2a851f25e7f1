"""Tiers: where a bucket's shard lives, and where what is gathered of it is read from."""

from __future__ import annotations

from enum import Enum


class Tier(str, Enum):
    """A kind of memory, nearest to the compute first.

    A bucket's home holds its shard as the user sees it, its gradient and its optimizer states; its
    source holds what gathers read. A source is never farther than the home, whose copy it is.
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def distance(self) -> int:
        """How far from the compute it is: 0 for the device itself."""
        return list(Tier).index(self)


TIER_OF = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}  # by the plan's word
