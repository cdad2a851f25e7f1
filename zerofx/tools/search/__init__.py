"""Search for the plans that fit a model on some hardware, and the fastest of them."""

from zerofx.tools.search.entry import search

__all__ = ["search"]
