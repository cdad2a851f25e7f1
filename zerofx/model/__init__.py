"""Compiled models: the user's model after compilation, and the programs that its calls run."""
