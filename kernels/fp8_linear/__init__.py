"""y = x @ W^T + b in 8-bit floats: half the bytes of the weights."""
