"""Mixed random load in one engine for as long as it takes to see what only time shows."""
