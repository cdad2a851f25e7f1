"""The layout of parameters, decided before capture: tiers, tiles, buckets and their building."""
