"""Attention of the last tokens of each sequence, 1 to 4, over slabs of several formats."""
