"""Pages resized, reordered to RGB planes and normalised in one pass: what a vision model takes."""
