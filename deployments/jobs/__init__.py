"""Entry scripts of `ray job submit`."""
