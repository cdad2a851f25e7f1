"""Trials: a few steps of a compiled model on real ranks, compared with plain training."""
