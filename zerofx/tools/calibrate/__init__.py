"""Measure this machine, and describe it as `zerofx.hardware`."""
