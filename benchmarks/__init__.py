"""Benchmarks, one command each: `python -m benchmarks.step_time`, `.compile_time`, `.memory`."""
