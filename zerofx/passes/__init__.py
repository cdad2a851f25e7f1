"""One file a rewrite. order.py names them in the order in which they run."""
