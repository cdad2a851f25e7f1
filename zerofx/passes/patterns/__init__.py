"""What `fuse` replaces, and by what: one file a pattern. They are no passes."""
