"""Measurements beside a peer in the same run. Each is one command; none runs with the tests."""
