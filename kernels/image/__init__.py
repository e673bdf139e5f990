"""Pages as images, a batch of uint8 pages in one launch: colour, size, ink, skew, ruled lines."""
