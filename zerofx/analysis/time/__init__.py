"""The time of a step: steps, tasks, prices, and when each task runs."""
