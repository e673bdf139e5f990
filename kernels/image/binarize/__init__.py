"""Ink from paper by Sauvola's local threshold, equal to scikit-image's in every pixel."""
