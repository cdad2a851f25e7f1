"""Compiled regions: loaded, cached, under which keys, and the search for a NaN in them."""
