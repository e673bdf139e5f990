"""Kernels, each with a plain-PyTorch reference beside it that is its specification."""
