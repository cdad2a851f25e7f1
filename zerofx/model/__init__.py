"""The user's model once it is compiled, and the programs that its calls run."""
