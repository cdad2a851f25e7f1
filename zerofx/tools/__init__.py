"""What people use around training: the core imports none of it."""
