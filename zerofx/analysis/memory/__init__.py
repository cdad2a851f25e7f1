"""The memory of a rank, from the start of forward to the optimizer's step."""
