"""Chooses the blocks that the next step skips, from what they weighed in this one."""
