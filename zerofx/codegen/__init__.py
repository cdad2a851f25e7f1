"""A program as an emitted module, and an emitted module read back as a program."""
