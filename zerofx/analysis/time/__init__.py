"""What a step spends time on: steps, tasks, prices, and when each of them runs."""
