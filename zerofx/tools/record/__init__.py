"""Measure what a compiled model does, beside what was predicted: `zerofx.record`."""
