"""Deals the slabs of a step to the programs of tiered_decode."""
