"""Causal attention over a paged KV cache."""
