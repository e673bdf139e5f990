"""Writes new keys and values into their slots of the paged KV cache."""
