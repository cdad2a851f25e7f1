"""Measure what a compiled model does, next to what was predicted: `zerofx.record`."""
