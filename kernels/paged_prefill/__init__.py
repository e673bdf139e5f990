"""Causal attention of prompt chunks over a paged KV cache."""
