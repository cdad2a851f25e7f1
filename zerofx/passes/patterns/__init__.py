"""The patterns that the pass `fuse` replaces, one file per pattern."""
