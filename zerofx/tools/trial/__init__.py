"""Trials: a few steps of a compiled model on real ranks, held against plain training."""
