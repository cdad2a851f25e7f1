"""Ranks: their mesh, how they exchange tensors, and how they agree before every call."""
