"""Turns queries and keys to their positions, rotates both, and appends keys and values to slabs."""
