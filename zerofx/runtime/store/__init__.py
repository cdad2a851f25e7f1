"""The shards of a model: their module tree, first values, gradients, optimizer and state."""
