"""Code generation: a program as an emitted module, and the way back."""
