"""Decode attention that leaves out the values of cold blocks, and certifies how much that was."""
