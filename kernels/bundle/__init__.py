"""Kernels compiled ahead of time: built on any host, loaded by GPU hosts without Triton."""
