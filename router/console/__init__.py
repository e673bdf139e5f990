"""The web console: static files only. They hold no key, no inline script and no inline style."""
