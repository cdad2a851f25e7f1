"""Sharded parameters, as users see them."""
