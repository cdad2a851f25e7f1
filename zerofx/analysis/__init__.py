"""Analyses of a finished program, and the choices based on them. Nothing is rewritten."""
