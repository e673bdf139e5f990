"""y = x @ W^T + b, with W packed once at load where the device gains by it."""
