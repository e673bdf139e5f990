"""Our kernels on a GPU, beside torch eager, torch.compile and, where it is installed, kornia."""
