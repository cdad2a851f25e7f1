"""Ranks: who they are, how they exchange tensors, and how they agree before every call."""
