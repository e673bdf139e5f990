"""The whole app over HTTP, as its clients see it."""
