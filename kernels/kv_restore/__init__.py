"""Blocks of any format as the pages that attention over plain tokens reads."""
