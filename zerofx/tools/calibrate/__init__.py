"""Measure the machine this runs on, as `zerofx.hardware` describes machines."""
