"""Attention of one new token a sequence over the paged KV cache."""
