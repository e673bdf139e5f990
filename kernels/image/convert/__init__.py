"""Grey levels and colour orders of pages, equal to OpenCV's in every bit."""
