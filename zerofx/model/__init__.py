"""The module that a user trains: it looks like the model, and runs a program a signature."""
