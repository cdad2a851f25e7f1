"""A zoo of models, each trained compiled and plainly: `python -m benchmarks.zoo`."""
