"""Search: the plans that fit a model on a hardware, and which of them is the fastest."""

from zerofx.tools.search.entry import search

__all__ = ["search"]
