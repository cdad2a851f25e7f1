"""The demo: a byte-level GPT that learns Python from the standard library's own sources."""
