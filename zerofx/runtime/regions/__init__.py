"""Compiled regions: loading, the cache and its keys, and the search for a NaN in them."""
