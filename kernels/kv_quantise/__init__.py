"""Blocks of the KV cache in fewer bits."""
