"""Search: the plans that fit a model on a hardware, and which of them is the fastest."""

from zerofx.searching.entry import search

__all__ = ["search"]
