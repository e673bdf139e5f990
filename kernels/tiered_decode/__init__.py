"""Attention of one new token a sequence over slabs of several formats."""
