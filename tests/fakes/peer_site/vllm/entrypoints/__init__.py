"""Where the real one keeps its servers."""
