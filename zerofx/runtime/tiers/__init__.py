"""Storage tiers off the device: host and NVMe memory, and the transfers to and from it."""
