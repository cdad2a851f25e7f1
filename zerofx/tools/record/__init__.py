"""Measure the steps of a compiled model, next to their prediction: `zerofx.record`."""
