"""Turns queries and keys to their positions, and appends keys and values to the paged KV cache."""
