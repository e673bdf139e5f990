"""Thin Ray Serve shells that wire engine, router and cluster together."""
