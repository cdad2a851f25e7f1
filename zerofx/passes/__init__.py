"""Rewrites of a program: one file per pass, run in the order of order.py."""
