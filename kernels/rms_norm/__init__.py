"""Root-mean-square layer norm over the last dimension."""
