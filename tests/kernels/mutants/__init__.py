"""Shipped kernels with one mistake each: a table per op, of edits and of what must catch them."""
