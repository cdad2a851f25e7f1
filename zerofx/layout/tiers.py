"""Tiers: the kind of memory in which a bucket's shard lives, and from which it is gathered."""

from __future__ import annotations

from enum import Enum


class Tier(str, Enum):
    """A kind of memory; members are ordered by their distance from the compute.

    The home of a bucket holds its shard as the user sees it, its gradient and its optimizer states.
    Its source holds the data that gathers read: a copy in the home's tier or a nearer one.
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def distance(self) -> int:
        """The distance from the compute: 0 for the device itself."""
        return list(Tier).index(self)


TIER_OF = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}  # by the word in a plan
