"""Recomputation: which activations to keep and which to recompute, as facts and as a choice."""
