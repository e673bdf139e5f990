"""Rotary position embedding of queries and keys, halves convention."""
