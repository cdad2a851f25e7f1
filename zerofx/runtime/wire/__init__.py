"""Wire forms: how a bucket's parameters and gradients travel other than whole and in full width."""
