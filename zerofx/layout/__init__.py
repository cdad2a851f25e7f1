"""What lies where, decided before capture: tiers, tiles, buckets, and how they are built."""
