"""Shards of a model: their module tree, initial values, gradients, optimizer and state."""
