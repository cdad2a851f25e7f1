"""Other libraries' interfaces over zerofx, each imported by its users only."""
