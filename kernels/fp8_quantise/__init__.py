"""Rows in 8-bit floats, each with a scale of its own."""
