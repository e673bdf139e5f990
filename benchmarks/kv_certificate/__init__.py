"""Skipped values of cold blocks: certificates against float64, what they cost, what they gain."""
