"""What to keep of a forward and what to compute again, as facts and as a choice."""
