"""Whole servers beside each other, over HTTP."""
